"""Builds the CUDA machine: an environment in which the real CuPy runs on a CPU.

    python tests/elsewhere/cuda_machine/build.py [--folder FOLDER]

What is there already and is made of the same files stays. Needs g++, and pip with its packages.
The folder is MPIPAR_CUDA_MACHINE, or one of the user's cache; `run.py` starts commands in it.
"""

import argparse
import glob
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
SHIM = HERE.parents[1] / "helpers" / "cuda_shim"
CUPY = "14.2.0"
PACKAGES = [
    f"cupy-cuda13x=={CUPY}",
    "fastrlock",
    "cuda-pathfinder",
    "cython",
    "nvidia-cuda-runtime==13.*",
    "nvidia-cuda-crt==13.*",
]  # without what they need: NVRTC is ours
SOURCES = ["queue", "memory", "runtime", "driver", "nvrtc", "cublas", "cublaslt"]
# Under these names CuPy and its libraries look for CUDA's; all of them are the one library.
NAMES = [
    "libcuda.so.1",
    "libcudart.so.13",
    "libcudart.so",
    "libnvrtc.so.13",
    "libcublas.so.13",
    "libcublasLt.so.13",
    "libcusolver.so.12",
    "libcurand.so.10",
    "libcusparse.so.12",
    "libcufft.so.12",
]
UNKNOWN = {"cuda": 801, "cublas": 15}  # prefix -> the error of a function that is not there
COMPILER = (
    "g++ -std=c++20 -w -fpermissive -O1 -U_FORTIFY_SOURCE -fPIC -fvisibility=hidden "
    "-fno-gnu-unique -pthread -fsanitize=alignment -fsanitize-undefined-trap-on-error"
)
if " fma " in Path("/proc/cpuinfo").read_text():
    COMPILER += " -mfma -ffp-contract=fast"  # a product and a sum are rounded once, as on a GPU


def default_folder() -> Path:
    """Return where the machine is, or will be."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("MPIPAR_CUDA_MACHINE") or cache / "mpipar" / "cuda-machine")


def digest(*paths: Path) -> str:
    """Return a digest of files and of all files of folders."""
    files = [one for path in paths for one in ([path] if path.is_file() else path.rglob("*"))]
    total = hashlib.sha256()
    for one in sorted(files):
        if one.is_file() and "__pycache__" not in one.parts:
            total.update(one.read_bytes())
    return total.hexdigest()[:16]


class Machine:
    """The parts of a machine, each made once for what it is made of."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.python = folder / "venv" / "bin" / "python"
        self.libraries = folder / "lib"
        self.device = folder / "device"
        # Kernels that do nothing must not get among those that do.
        kind = "kernels" if os.environ.get("CUDA_MACHINE_NULL", "0") == "0" else "null"
        made_of = digest(SHIM, HERE / "device", HERE / "nvrtc.cpp", HERE / "build.py")
        self.kernels = folder / kind / made_of

    def environment(self) -> dict[str, str]:
        """Return the variables under which a command runs on the machine."""
        return os.environ | {
            "PATH": f"{self.python.parent}:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": str(self.libraries),
            "LD_PRELOAD": str(self.libraries / "libcudart.so.13"),
            "CUDA_MACHINE_DEVICE": str(self.device),
            "CUDA_MACHINE_COMPILER": COMPILER,
            "CUPY_ACCELERATORS": "",  # CUB needs NVIDIA's compiler
            "CUPY_CACHE_DIR": str(self.kernels),
            "PYTHONPATH": str(ROOT),
            "MPIPAR_SHIM_FOLDER": str(self.folder / "shim"),
        }

    def build(self) -> None:
        """Make what is missing or out of date."""
        for folder in (self.libraries, self.kernels, self.folder / "shim"):
            folder.mkdir(parents=True, exist_ok=True)
        environment = f"{CUPY} {PACKAGES} {ROOT} {digest(ROOT / 'setup.cfg')}"
        self._once("environment", environment, self._make_environment)
        headers = f"{environment} {COMPILER} {digest(SHIM, HERE / 'device', HERE / 'image.h')}"
        runtime = f"{environment} {digest(HERE / 'cythonize.py')}"
        sources = digest(*HERE.glob("*.cpp"), *HERE.glob("*.h"), HERE / "site")
        with ThreadPoolExecutor() as pool:  # a compiler takes one core, a download none
            beside = pool.submit(self._once, "device headers", headers, self._make_headers)
            self._once("CuPy's runtime module", runtime, self._make_runtime)
            self._once("libraries", f"{runtime} {sources}", self._make_libraries)
            beside.result()

    def _once(self, name: str, made_of: str, make) -> None:
        stamp = self.folder / f"{name}.made-of"
        if stamp.exists() and stamp.read_text() == made_of:
            return
        start = time.perf_counter()
        make()
        stamp.write_text(made_of)
        print(f"{name}: {time.perf_counter() - start:.0f} s", flush=True)

    def _site(self) -> Path:
        return Path(glob.glob(str(self.folder / "venv" / "lib" / "python3*" / "site-packages"))[0])

    def _make_environment(self) -> None:
        shutil.rmtree(self.folder / "venv", ignore_errors=True)
        run(sys.executable, "-m", "venv", self.folder / "venv")
        pip = [self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run(*pip, "-e", f"{ROOT}[mpich,test]")
        run(*pip, "--no-deps", *PACKAGES)

    def _make_runtime(self) -> None:
        """Compile cupy_backends.cuda.api.runtime again: the wheel's has libcudart inside."""
        source = self.folder / "source"
        shutil.rmtree(source, ignore_errors=True)
        source.mkdir()
        run(
            self.python,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-binary",
            "cupy",
            f"cupy=={CUPY}",
            cwd=source,
            env=os.environ | {"CUPY_INSTALL_USE_STUB": "1"},
        )
        with tarfile.open(source / f"cupy-{CUPY}.tar.gz") as archive:
            archive.extractall(source, filter="data")
        unpacked = source / f"cupy-{CUPY}"
        module = "cupy_backends/cuda/api/runtime"
        run(self.python, "-W", "ignore", HERE / "cythonize.py", module, cwd=unpacked)
        include = sysconfig.get_paths()["include"]
        suffix = sysconfig.get_config_var("EXT_SUFFIX")
        run(
            "g++",
            "-O1",
            "-fPIC",
            "-shared",
            "-w",
            "-D_FORCE_INLINES=1",
            '-DCYTHON_EXTERN_C=extern "C"',
            "-DCUPY_CACHE_KEY=machine",
            f"-I{include}",
            f"-I{self._cuda_headers()}",
            f"-I{HERE / 'include'}",
            f"{module}.cpp",
            "-o",
            self._site() / f"{module}{suffix}",
            cwd=unpacked,
        )
        shutil.rmtree(source)

    def _cuda_headers(self) -> Path:
        return self._site() / "nvidia" / "cu13" / "include"

    def _make_libraries(self) -> None:
        stubs = self.libraries / "stubs.cpp"
        stubs.write_text(self._stubs())
        with ThreadPoolExecutor() as pool:
            objects = list(pool.map(self._object, [HERE / f"{name}.cpp" for name in SOURCES]))
        library = self.libraries / "libmachine.so"
        run(
            "g++",
            "-shared",
            "-fPIC",
            *objects,
            stubs,
            "-o",
            library,
            "-pthread",
            "-ldl",
            "-Wl,-soname,libmachine.so",
        )
        for name in NAMES:
            (self.libraries / name).unlink(missing_ok=True)
            (self.libraries / name).symlink_to(library.name)
        shutil.copytree(HERE / "site", self._site(), dirs_exist_ok=True)

    def _object(self, source: Path) -> Path:
        """Compile one source of the libraries."""
        made = self.libraries / f"{source.stem}.o"
        run(
            "g++",
            "-std=c++20",
            "-O2",
            "-Wall",
            "-fPIC",
            "-fvisibility=hidden",
            f"-I{self._cuda_headers()}",
            f"-I{HERE / 'include'}",
            "-c",
            source,
            "-o",
            made,
        )
        return made

    def _stubs(self) -> str:
        """Return weak functions that say their name and fail, for all that CuPy may ask."""
        backends = self._site() / "cupy_backends" / "cuda"
        modules = [*backends.glob("api/runtime.*.so"), *backends.glob("libs/cublas.*.so")]
        asked = {
            line.split()[-1].split("@")[0]
            for module in modules
            for line in output("nm", "-D", "--undefined-only", module).splitlines()
        }
        stub = 'extern "C" __attribute__((visibility("default"), weak)) int'
        say = 'fprintf(stderr, "cuda machine: {} is not there\\n");'
        return "#include <cstdio>\n" + "".join(
            f"{stub} {name}() {{ {say.format(name)} return {error}; }}\n"
            for name in sorted(asked)
            for prefix, error in UNKNOWN.items()
            if name.startswith(prefix)
        )

    def _make_headers(self) -> None:
        """Lay out the device headers, and compile CuPy's in advance for both kinds of threads."""
        shutil.rmtree(self.device, ignore_errors=True)
        shutil.copytree(HERE / "device", self.device)
        for path in [*SHIM.glob("*.h"), SHIM / "mma.cuh", HERE / "image.h"]:
            shutil.copy(path, self.device)
        cupy = self._site() / "cupy" / "_core" / "include"
        for kind, option in (("fibers", []), ("loops", ["-DMACHINE_LOOPS"])):
            (self.device / kind).mkdir()
            run(
                *COMPILER.split(),
                *option,
                f"-I{self.device}",
                f"-I{cupy}",
                "-x",
                "c++-header",
                self.device / "prelude.h",
                "-o",
                self.device / kind / "prelude.h.gch",
            )


def run(*command, **options) -> None:
    """Run a command; its failure ends the build."""
    subprocess.run([str(one) for one in command], check=True, **options)


def output(*command) -> str:
    """Return what a command prints, without the last line's end."""
    done = subprocess.run([str(one) for one in command], check=True, capture_output=True, text=True)
    return done.stdout.strip()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the CUDA machine.")
    parser.add_argument("--folder", type=Path, default=default_folder())
    machine = Machine(parser.parse_args().folder.resolve())
    machine.build()
    print(f"the CUDA machine is in {machine.folder}")
