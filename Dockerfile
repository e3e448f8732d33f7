# docker build -t mini-engine .
# Without CUDA's libraries:
# docker build -t mini-engine --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
FROM python:3.12-slim
ARG TORCH_INDEX=https://pypi.org/simple

# Triton compiles a launcher for each kernel at its first use; the image has Python's headers already.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

# As root it would work, too. The cache holds hub models and compiled kernels; a new volume takes over its owner.
RUN useradd --uid 1000 --create-home engine && install -d -o engine -g engine /home/engine/.cache
ENV TRITON_CACHE_DIR=/home/engine/.cache/triton

WORKDIR /opt/mini-engine
# hadolint ignore=DL3013
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" torch torchvision
# The dependencies and the version of the program, whose code is run from here: a change of it installs nothing again.
COPY pyproject.toml README.md ./
RUN pip install --no-cache-dir .
COPY serve.py ./
COPY mini_engine mini_engine

USER 1000
EXPOSE 8000
ENTRYPOINT ["python", "serve.py"]
