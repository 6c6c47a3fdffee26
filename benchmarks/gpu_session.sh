#!/bin/sh
# Everything that needs a GPU, in one command: from files to predictions and gradients, serving, fp8, memory.
#
#     sh benchmarks/gpu_session.sh PHOTOS RESULTS                          all parts, about 25 minutes on an H200
#     sh benchmarks/gpu_session.sh PHOTOS RESULTS decode predict train     some of them; --list names them
#     sh benchmarks/gpu_session.sh PHOTOS RESULTS --tiny --device cpu      smoke test, a few minutes
#
# PHOTOS is a folder of JPEGs (a hundred of about 500x375 will do), RESULTS is created. A part that fails or takes too
# long does not stop the others. RESULTS has rows.jsonl, written after every part, and the output of each part; the
# table comes last. See benchmarks/gpu_session.py.
#
# Needs Python 3.12 and torch 2.11 for CUDA 13 with Triton, and a C compiler. What else is missing is installed from the
# wheels in $WHEELS (default: wheels), without a network. To get these wheels (52 MB):
#
#     pip download --no-deps --only-binary :all: --python-version 3.12 --platform manylinux_2_28_x86_64 \
#         --platform manylinux2014_x86_64 --dest wheels \
#         numpy pillow safetensors pydantic pydantic-core annotated-types typing-inspection typer click shellingham \
#         rich markdown-it-py mdurl pygments huggingface-hub httpx httpcore h11 anyio idna certifi fsspec pyyaml tqdm \
#         filelock packaging simplejpeg nvidia-nvimgcodec-cu13 nvidia-nvjpeg timm torchao litserve fastapi \
#         annotated-doc pyzmq starlette uvicorn python-multipart prometheus-client pytest pluggy iniconfig hypothesis \
#         sortedcontainers
#
# What the machine has already can be left out; torchvision (for timm and its own decoder) must fit its torch.
set -u
here=$(dirname "$0")/..
python=${PYTHON:-python3}
for wheel in "${WHEELS:-wheels}"/*.whl; do
    [ -e "$wheel" ] || continue
    name=$(basename "$wheel" | cut -d- -f1)
    "$python" -c "import importlib.metadata, sys; importlib.metadata.version(sys.argv[1])" "$name" 2>/dev/null && continue
    "$python" -m pip install --quiet --no-index --no-deps "$wheel" || echo "$name cannot be installed" >&2
done
PYTHONPATH="$here/src${PYTHONPATH:+:$PYTHONPATH}" exec "$python" "$here/benchmarks/gpu_session.py" "$@"
