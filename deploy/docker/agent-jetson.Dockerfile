# syntax=docker/dockerfile:1
# The agent on a Jetson with JetPack 6, with torch from NVIDIA's image for the board's GPU. Not built or run yet.
# Build on the Jetson, or elsewhere with --platform linux/arm64, from the repository's root; run with NVIDIA's container runtime:
#   docker build -f deploy/docker/agent-jetson.Dockerfile --build-arg BASE_IMAGE=IMAGE -t fedcg-agent-jetson .
#   docker run --runtime nvidia -e FEDCG_AGENT_STORE=/var/lib/fedcg/store -v fedcg:/var/lib/fedcg \
#     -v /etc/fedcg/NAME:/etc/fedcg:ro -v /srv/images:/srv/images:ro fedcg-agent-jetson
# BASE_IMAGE has no default: NVIDIA's PyTorch image for the integrated GPU (`-igpu`) and the board's JetPack, with torch 2.6 or newer (NVIDIA's
# pre-releases 2.6.0a0+... included) and Python 3.10 to 3.13. ONNXRUNTIME is a build of onnxruntime with CUDA for the same JetPack, in a form
# that pip accepts, such as a wheel's address (docs/reference/hardware.md, "Builds for Jetsons"). Without it, the base image must contain one.
# constraints.txt is for 3.11 and is not used: packages are the newest ones compatible with the base image's torch.
ARG BASE_IMAGE

FROM ${BASE_IMAGE} AS build
ARG ONNXRUNTIME=""
# The base image's own constraints keep numpy below 2. The file named here only pins its torch, so that pip fails instead of replacing it.
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=/src/base-torch.txt
WORKDIR /src
COPY . .
RUN python3 -c "from importlib.metadata import version; print('torch==' + version('torch'))" >base-torch.txt \
    && python3 -m venv --without-pip --system-site-packages /opt/fedcg \
    && python3 -m pip --python /opt/fedcg/bin/python install '.[edge]' ${ONNXRUNTIME:+"${ONNXRUNTIME}"} \
    # This torch must work with the numpy that the agent installed.
    && /opt/fedcg/bin/python -c "import torch; torch.ones(1).numpy()" \
    # An onnxruntime without CUDA would silently predict on the CPU.
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
