#!/usr/bin/env bash
# From nothing to a model that transformers loads: text, tokenizer, training, a crash, and text again.
#
#     bash docs/from-nothing.sh FOLDER
#
# FOLDER must be new. mpipar (with the extra `text`), an MPI launcher, transformers and PyTorch must
# be installed. The text is Python's language reference as every CPython carries it, in the module
# pydoc_data.topics, so nothing is downloaded. It takes some two minutes on two cores.
set -euo pipefail
mkdir "$1"
cd "$1"
export OMP_NUM_THREADS=1 # four ranks on two cores: more threads would only wait for each other

echo "== text: one file per topic of the language reference"
python3 - <<'PYTHON'
from pathlib import Path
from pydoc_data.topics import topics

Path("text").mkdir()
for name, text in topics.items():
    Path("text", name.replace("/", "-") + ".txt").write_text(text, encoding="utf-8")
PYTHON

echo "== tokens: a tokenizer of 2,048 ids is trained, and whole files are held out"
mpipar data prepare text --tokenizer train:2048 --out data

echo "== training: a small Llama, blocks cut over two pipeline stages, matrices over two ranks each"
mpiexec -n 4 mpipar train --data data --out "$PWD/run" --arch llama --layers 4 --d-model 128 \
    --heads 4 --kv-heads 2 --seq-len 128 --batch-size 8 --steps 100 --pp 2 --tp 2 --lr 3e-3 \
    --eval-interval 20 --eval-tokens 4096 --save-interval 20 --sample-tokens 40 &
job=$!

# In the middle all ranks die without a word, as if the host had lost its power.
until [[ -d run/checkpoints/step-00000040 ]]; do
    kill -0 $job # ends the script if the training has failed
    sleep 0.2
done
pkill -KILL -f -- "mpipar train .* --out $PWD/run "
wait $job || echo "== killed; what is left:"
mpipar ckpt ls run

echo "== resumed from the newest checkpoint; the settings are those of the run"
mpiexec -n 4 mpipar train --resume auto --out run

echo "== exported: the weights of the last checkpoint in Hugging Face's form, with the tokenizer"
mpipar ckpt export run --out model
ls model

echo "== transformers loads it, and both continue the same text alike"
export HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1
mpipar generate model --prompt "The value of the" --sample-tokens 16 --temperature 0 >ours.txt
python3 - <<'PYTHON'
import warnings
from pathlib import Path

warnings.simplefilter("error")  # a warning would say that something is missing in the folder
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("model")
model = AutoModelForCausalLM.from_pretrained("model")
prompt = tokenizer("The value of the", return_tensors="pt")
ids = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0]
theirs = tokenizer.decode(ids, skip_special_tokens=True)
ours = Path("ours.txt").read_text(encoding="utf-8").removesuffix("\n")
print(f"mpipar:       {ours!r}\ntransformers: {theirs!r}")
assert theirs == ours, "the texts differ"
PYTHON
echo "== done"
