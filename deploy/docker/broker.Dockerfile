# syntax=docker/dockerfile:1
# Mosquitto, and the program that updates its lists of devices. Build from the repository's root:
#   docker build -f deploy/docker/broker.Dockerfile -t fedcg-broker .
# It runs from a folder of `fedcg deploy mosquitto`, mounted at /var/lib/fedcg-broker.
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv /opt/fedcg
COPY . .
RUN /opt/fedcg/bin/pip install --constraint constraints.txt '.[wire]'

FROM ${PYTHON_IMAGE}
# Debian 12 keeps one Mosquitto version and only adds fixes; a pinned revision would disappear with the next fix.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends mosquitto \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 fedcg \
    && useradd --uid 10001 --gid 10001 --home-dir /var/lib/fedcg-broker --create-home --shell /usr/sbin/nologin fedcg
COPY --from=build /opt/fedcg /opt/fedcg
ENV PATH=/opt/fedcg/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
VOLUME ["/var/lib/fedcg-broker"]
WORKDIR /var/lib/fedcg-broker
# The same ids as in the coordinator's image, which writes the folder.
USER 10001:10001
EXPOSE 8883
STOPSIGNAL SIGTERM
ENTRYPOINT ["fedcg"]
CMD ["broker", "run", "--dir", "/var/lib/fedcg-broker"]
