# syntax=docker/dockerfile:1
# Predictions of exported models over HTTP, without torch; amd64 and arm64. Build from the repository's root:
#   docker build -f deploy/docker/infer.Dockerfile -t fedcg-infer .
# The server has no accounts: only publish the port on loopback, and mount the models' folder at /models:
#   docker run -p 127.0.0.1:8080:8080 -v /srv/models:/models fedcg-infer
ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
RUN python -m venv /opt/fedcg
COPY . .
RUN /opt/fedcg/bin/pip install --constraint constraints.txt '.[serve,infer]'

FROM ${PYTHON_IMAGE}
RUN groupadd --gid 10001 fedcg \
    && useradd --uid 10001 --gid 10001 --no-create-home --shell /usr/sbin/nologin fedcg
COPY --from=build /opt/fedcg /opt/fedcg
ENV PATH=/opt/fedcg/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
EXPOSE 8080
STOPSIGNAL SIGTERM
ENTRYPOINT ["fedcg"]
CMD ["infer", "serve", "--model", "/models", "--host", "0.0.0.0"]
