# shellcheck shell=bash
# `./dalsegno setup --torch`: install PyTorch into .venv. Without an NVIDIA GPU it must be a CPU build: the one from PyPI
# downloads gigabytes of CUDA libraries. So pip only sees sources that offer nothing else: PyTorch's CPU index, then the
# wheel folders in pip's configuration.

CPU_INDEX=https://download.pytorch.org/whl/cpu

# Look for its folders, because importing it takes seconds.
has_torch() { compgen -G "$VENV/lib/python3*/site-packages/torch" >/dev/null && compgen -G "$VENV/lib/python3*/site-packages/numpy" >/dev/null; }

install_torch() {
    if venv_python -c 'import numpy, torch' 2>/dev/null; then
        say "torch is already installed"
    elif has_nvidia_gpu; then
        say "installing torch with CUDA"
        quietly pip_install 'torch>=2.1' || fail "pip could not install torch" "fix the error of pip above, then try again"
    else
        install_cpu_torch
    fi
    quietly pip_install numpy || fail "pip could not install numpy" "fix the error of pip above, then try again"
}

install_cpu_torch() {
    say "installing torch, CPU build (no NVIDIA GPU here)"
    torch_from_cpu_index || torch_from_wheel_folder || fail "no CPU build of torch found: neither $CPU_INDEX nor a wheel folder in pip's configuration (find-links) offers one" \
        "download a CPU wheel and run: .venv/bin/python -m pip install ./torch-….whl"
}

# Ignore pip's configuration: another index could offer a newer torch with CUDA.
torch_from_cpu_index() {
    (
        unset PIP_EXTRA_INDEX_URL PIP_FIND_LINKS
        PIP_CONFIG_FILE=/dev/null pip_install --index-url "$CPU_INDEX" --timeout 5 --retries 0 'torch>=2.1'
    ) >/dev/null 2>&1
}

torch_from_wheel_folder() {
    pip_install --no-index --no-deps 'torch>=2.1' >/dev/null 2>&1 || return 1
    if venv_python -c "$WANTS_CUDA"; then
        venv_python -m pip uninstall --quiet --yes torch >/dev/null 2>&1
        return 1
    fi
    quietly pip_install 'torch>=2.1' # it is installed already: only its dependencies are downloaded
}

WANTS_CUDA='
import sys
from importlib.metadata import requires
sys.exit(not any(need.startswith(("nvidia-", "cuda-")) for need in requires("torch") or ()))'

has_nvidia_gpu() { [ -e /proc/driver/nvidia/version ] || nvidia-smi -L >/dev/null 2>&1; }

venv_python() { "$VENV/bin/python" "$@"; }

pip_install() { venv_python -m pip install --quiet --disable-pip-version-check --no-input "$@"; }
