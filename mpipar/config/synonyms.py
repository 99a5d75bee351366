"""Names that people type: other programs' names for settings, and example values."""

from mpipar.config.setting import flag
from mpipar.errors import suggestion

SYNONYMS = {  # other programs' names -> field
    "learning_rate": "lr",
    "num_layers": "layers",
    "n_layer": "layers",
    "hidden_size": "d_model",
    "width": "d_model",
    "n_embd": "d_model",
    "num_heads": "heads",
    "n_head": "heads",
    "num_attention_heads": "heads",
    "ffn_hidden_size": "ffn",
    "block_size": "seq_len",
    "context": "seq_len",
    "seq_length": "seq_len",
    "max_position_embeddings": "seq_len",
    "global_batch": "batch_size",
    "global_batch_size": "batch_size",
    "max_steps": "steps",
    "max_iters": "steps",
    "train_iters": "steps",
    "warmup_iters": "warmup_steps",
    "lr_warmup_iters": "warmup_steps",
    "grad_clip": "clip",
    "clip_grad": "clip",
    "adam_beta1": "beta1",
    "adam_beta2": "beta2",
    "adam_eps": "eps",
    "output": "out",
    "out_dir": "out",
    "save": "out",
    "load": "init_from",
    "dataset": "data",
    "data_path": "data",
    "name": "run_name",
    "normalization": "norm",
    "tensor_model_parallel_size": "tp",
    "pipeline_model_parallel_size": "pp",
    "context_parallel_size": "cp",
    "num_layers_per_virtual_pipeline_stage": "chunks",
    "save_steps": "save_interval",
    "checkpoint_interval": "save_interval",
    "resume_from_checkpoint": "resume",
    "save_total_limit": "keep_checkpoints",
    "async_save": "save_async",
    "lr_decay_style": "lr_schedule",
    "lr_scheduler": "lr_schedule",
    "lr_scheduler_type": "lr_schedule",
    "eval_steps": "eval_interval",
    "validation_data": "val_data",
    "valid_data": "val_data",
    "valid_data_path": "val_data",
    "logging_steps": "log_interval",
    "sample_every": "sample_interval",
    "zero_stage": "zero",
    "num_key_value_heads": "kv_heads",
    "n_kv_heads": "kv_heads",
    "num_query_groups": "kv_heads",
    "kv_channels": "head_dim",
    "rotary_base": "rope_theta",
    "rms_norm_eps": "norm_eps",
    "cp_comm_type": "cp_attention",
    "layer_norm_epsilon": "norm_eps",
    "norm_epsilon": "norm_eps",
    "hidden_act": "activation",
    "activation_function": "activation",
    "intermediate_size": "ffn",
    "num_experts": "experts",
    "num_local_experts": "experts",
    "n_routed_experts": "experts",
    "moe_router_topk": "experts_per_token",
    "num_experts_per_tok": "experts_per_token",
    "moe_ffn_hidden_size": "expert_ffn",
    "moe_intermediate_size": "expert_ffn",
    "moe_layer_freq": "expert_interval",
    "decoder_sparse_step": "expert_interval",
    "moe_shared_expert_intermediate_size": "shared_expert_ffn",
    "moe_router_load_balancing_type": "router_balance",
    "moe_aux_loss_coeff": "router_loss_coef",
    "router_aux_loss_coef": "router_loss_coef",
    "moe_router_bias_update_rate": "router_bias_rate",
    "expert_model_parallel_size": "ep",
    "moe_token_dispatcher_type": "expert_dispatch",
    "position_embedding_type": "positions",
    "tie_word_embeddings": "tied",
    "model_type": "arch",
}
ACCUMULATION = (
    "--num-microbatches, with the same number: a step accumulates the gradients of that"
    " many microbatches; --batch-size is the batch of the whole step, dp *"
    " num-microbatches * rows of a microbatch"
)
OTHERWISE = {  # other programs' names for what works differently here -> what to type
    "micro_batch_size": "--num-microbatches: a microbatch has batch-size / (dp *"
    " num-microbatches) rows",
    **dict.fromkeys(
        (
            "grad_accumulation",
            "grad_accumulation_steps",
            "gradient_accumulation",
            "gradient_accumulation_steps",
            "accumulate_grad_batches",
        ),
        ACCUMULATION,
    ),
    "tensorboard_dir": "--tensorboard: the event files go into the run folder",
    "eval_iters": "--eval-tokens, the number of tokens per evaluation",
    "lr_decay_iters": "--lr-schedule wsd and --decay-ratio, a share of the steps",
    "min_lr": "--min-lr-ratio, a share of --lr",
    "bf16": "--dtype bfloat16",
    "fp16": "--dtype float16",
    "use_flash_attn": "--kernels fused, on a GPU",
    "untie_embeddings_and_output_weights": "--no-tied",
    "swiglu": "--activation swiglu",
    "disable_bias_linear": "--bias none",
    "add_qkv_bias": "--bias qkv",
    **dict.fromkeys(
        ("recompute_granularity", "recompute_activations"),
        "--recompute attention, or --recompute block",
    ),
    **dict.fromkeys(
        ("tokenizer_type", "tokenizer_model"),
        "--data FOLDER, which mpipar data prepare makes with a tokenizer",
    ),
    "fsdp": "--zero 3",
    "use_distributed_optimizer": "--zero 1",
}
NOT_BUILT = {  # well-known names for what mpipar does not do -> what to do instead
    "dropout": "leave it out",
    "attention_dropout": "leave it out",
    "hidden_dropout": "leave it out",
    "compile": "leave it out",
    "fp8": "use --dtype bfloat16",
    "fp8_format": "use --dtype bfloat16",
    "wandb_project": "leave it out: a run folder has metrics.jsonl",
}
EXAMPLES = {
    "stage_layers": "3,2,2,1",
    "data": "text.txt",
    "val_data": "held-out.txt",
    "rope_scaling": "8,1,4,8192",
    "stop_token": "50256",
    "experts": "8",
}


def unknown_word(word: str, names, what: str) -> str:
    """Return the message for a word that is no flag or key (`what`) of the fields in `names`."""
    name = word.lstrip("-").replace("-", "_")
    if name in NOT_BUILT:
        return f"is not supported; {NOT_BUILT[name]}"
    if SYNONYMS.get(name) in names:
        return f"is called {flag(SYNONYMS[name])} here; type that"
    if name in OTHERWISE:
        return f"unknown {what}; type {OTHERWISE[name]}"
    options = {name.replace("_", "-"): flag(name) for name in names}
    options |= {
        other.replace("_", "-"): flag(name)
        for other, name in SYNONYMS.items()
        if name in names and other not in names
    }
    return f"unknown {what}{suggestion(word.lstrip('-').replace('_', '-'), options)}"
