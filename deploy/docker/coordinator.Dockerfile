# syntax=docker/dockerfile:1
# The coordinator: rounds, aggregation, HTTP interface. Build from the repository's root:
#   docker build -f deploy/docker/coordinator.Dockerfile -t fedcg-coordinator .
# TORCH_INDEX: an index with torch wheels for this kind of machine. Default: PyTorch's CPU index, which saves several GB.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv /opt/fedcg
COPY constraints.txt ./
RUN /opt/fedcg/bin/pip install --constraint constraints.txt --extra-index-url "${TORCH_INDEX}" torch
COPY . .
RUN /opt/fedcg/bin/pip install --constraint constraints.txt '.[coordinator,postgres,s3]'

FROM ${PYTHON_IMAGE}
# The same ids as in the broker's image: both read the broker's key.
RUN groupadd --gid 10001 fedcg \
    && useradd --uid 10001 --gid 10001 --home-dir /var/lib/fedcg --create-home --shell /usr/sbin/nologin fedcg \
    && install -d -o 10001 -g 10001 -m 0700 /var/lib/fedcg/broker
COPY --from=build /opt/fedcg /opt/fedcg
ENV PATH=/opt/fedcg/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
VOLUME ["/var/lib/fedcg"]
WORKDIR /var/lib/fedcg
USER 10001:10001
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=6 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8440/healthz', timeout=4)"]
ENTRYPOINT ["fedcg"]
CMD ["coordinator", "run", "--dir", "/var/lib/fedcg/home"]
