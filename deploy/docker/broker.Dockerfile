# syntax=docker/dockerfile:1
# Mosquitto with the configuration of deploy/mosquitto/. Build from the repository's root:
#   docker build -f deploy/docker/broker.Dockerfile -t fedcg-broker .
FROM debian:bookworm-slim
# Debian 12 keeps to one Mosquitto version and only mends it; a pinned revision would vanish with the next fix.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends mosquitto \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 fedcg \
    && useradd --uid 10001 --gid 10001 --home-dir /var/lib/fedcg-broker --create-home --shell /usr/sbin/nologin fedcg
COPY deploy/mosquitto/mosquitto.conf /etc/mosquitto/fedcg.conf
VOLUME ["/var/lib/fedcg-broker"]
# The same numbers as in the coordinator's image, which writes the broker's key and the ACL.
USER 10001:10001
EXPOSE 8883
STOPSIGNAL SIGTERM
ENTRYPOINT ["mosquitto", "-c", "/etc/mosquitto/fedcg.conf"]
