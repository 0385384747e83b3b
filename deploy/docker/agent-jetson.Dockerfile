# syntax=docker/dockerfile:1
# The agent on a Jetson with JetPack 6, with the torch of NVIDIA's image, which is made for the board's GPU. Not built and not run yet.
# Build on the Jetson, or elsewhere with --platform linux/arm64, from the repository's root; run with NVIDIA's container runtime:
#   docker build -f deploy/docker/agent-jetson.Dockerfile --build-arg BASE_IMAGE=IMAGE -t fedcg-agent-jetson .
#   docker run --runtime nvidia -e FEDCG_AGENT_STORE=/var/lib/fedcg/store -v fedcg:/var/lib/fedcg \
#     -v /etc/fedcg/NAME:/etc/fedcg:ro -v /srv/images:/srv/images:ro fedcg-agent-jetson
# BASE_IMAGE has no default: NVIDIA's image of PyTorch for the integrated GPU (`-igpu`) that fits the board's JetPack, with torch 2.6 (also a
# pre-release, as NVIDIA names them: 2.6.0a0+...) or newer and Python 3.10 to 3.13. ONNXRUNTIME is a build of onnxruntime with CUDA for the same
# JetPack, as pip takes it, such as a wheel's address (docs/tutorials/jetson.md); without it the base image must have one. constraints.txt is for 3.11 and is not used: packages are the newest that fit the base image's torch.
ARG BASE_IMAGE

FROM ${BASE_IMAGE} AS build
ARG ONNXRUNTIME=""
# The base image's own constraints hold numpy below 2; the file named here pins its torch alone, and pip fails rather than replace it.
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=/src/base-torch.txt
WORKDIR /src
COPY . .
RUN python3 -c "from importlib.metadata import version; print('torch==' + version('torch'))" >base-torch.txt \
    && python3 -m venv --without-pip --system-site-packages /opt/fedcg \
    && python3 -m pip --python /opt/fedcg/bin/python install '.[edge]' ${ONNXRUNTIME:+"${ONNXRUNTIME}"} \
    # This torch must work with the numpy that came with the agent.
    && /opt/fedcg/bin/python -c "import torch; torch.ones(1).numpy()" \
    # An onnxruntime without CUDA would predict on the CPU and not say so.
    && /opt/fedcg/bin/python -c "import onnxruntime; assert 'CUDAExecutionProvider' in onnxruntime.get_available_providers(), 'give ONNXRUNTIME'"

FROM ${BASE_IMAGE}
RUN groupadd --gid 10001 fedcg \
    && useradd --uid 10001 --gid 10001 --groups video --home-dir /var/lib/fedcg --create-home --shell /usr/sbin/nologin fedcg
COPY --from=build /opt/fedcg /opt/fedcg
ENV PATH=/opt/fedcg/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# The bundle of `fedcg device add`, the images (both read-only), and the private store.
VOLUME ["/var/lib/fedcg"]
WORKDIR /var/lib/fedcg
USER 10001:10001
STOPSIGNAL SIGTERM
ENTRYPOINT ["fedcg"]
CMD ["agent", "run", "--config", "/etc/fedcg/agent.toml"]
