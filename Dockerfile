# syntax=docker/dockerfile:1
# CPU by default; for CUDA pass an image that has Python, for example
#   docker build --build-arg BASE=nvidia/cuda:12.8.1-runtime-ubuntu24.04 --build-arg REQUIREMENTS=requirements-gpu.txt .
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
ARG REQUIREMENTS=requirements.txt
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc g++ python3-venv \
    && rm -rf /var/lib/apt/lists/*
COPY requirements/ /requirements/
RUN python3 -m venv /venv \
    && DS_BUILD_OPS=0 /venv/bin/pip install --no-cache-dir -r "/requirements/${REQUIREMENTS}"

FROM ${BASE}
RUN apt-get update \
    && apt-get install -y --no-install-recommends openssh-client pdsh \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 neox
COPY --from=build /venv /venv
COPY --chown=neox:neox . /neox
ENV PATH=/venv/bin:$PATH
USER neox
WORKDIR /neox
ENTRYPOINT ["python", "deepy.py"]
CMD ["--help"]
