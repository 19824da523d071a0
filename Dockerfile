# One image for the three programs: `docker run IMAGE` runs workers, `docker run IMAGE reaper` and `docker run IMAGE api`
# the others. Settings are environment variables; docs/operating.md describes how to run the image.
#
#   docker build -t dataloader .
#   docker build -t dataloader --build-arg INSTALL='. my-loaders==1.2' .       with pipelines of your own
#   docker build -t dataloader --build-arg INSTALL='.[embedded]' .             for a first try by `docker run IMAGE up`

FROM debian:trixie-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv ca-certificates
# Two environments: pip is in the first and installs into the second; the image gets only the second.
RUN python3 -m venv /opt/build && python3 -m venv --without-pip /opt/dataloader
WORKDIR /src
# Libraries come from the lock file, each version with its hashes: the same image tomorrow. They change seldom, so their
# layer is kept when only our code has changed.
COPY deploy/requirements.lock deploy/
RUN /opt/build/bin/pip --python /opt/dataloader/bin/python install --no-cache-dir --require-hashes -r deploy/requirements.lock
COPY setup.cfg pyproject.toml README.md LICENSE ./
COPY dataloader/ dataloader/
COPY sql/ sql/
ARG INSTALL="."
# pip leaves a locked version in place wherever what INSTALL names allows it.
RUN /opt/build/bin/pip --python /opt/dataloader/bin/python install --no-cache-dir ${INSTALL}

FROM debian:trixie-slim
RUN apt-get update && apt-get install -y --no-install-recommends python3 ca-certificates && rm -rf /var/lib/apt/lists/*
# The user has a fixed id, for the owner of volumes, and a name, which PostgreSQL requires (`up`).
RUN useradd --system --uid 10001 --user-group --no-create-home --home-dir /var/lib/dataloader dataloader \
 && install -d -o dataloader -g dataloader /var/lib/dataloader
COPY --from=build /opt/dataloader /opt/dataloader
# Log lines are not buffered. gunicorn's workers prove that they live by touching a file. The file is in memory: with a
# slow disk under /tmp gunicorn would kill them.
ENV PATH=/opt/dataloader/bin:$PATH PYTHONUNBUFFERED=1 DL_HOME=/var/lib/dataloader \
    GUNICORN_CMD_ARGS="--worker-tmp-dir /dev/shm"
USER dataloader
WORKDIR /var/lib/dataloader
VOLUME /var/lib/dataloader
EXPOSE 8081
# TERM drains. A drain needs time: `docker stop -t 60`, stop_grace_period: 60s; the default of 10 s cuts it short.
STOPSIGNAL SIGTERM
# There is no HEALTHCHECK, for only the api listens. For its container:
#   --health-cmd 'python3 -c "import urllib.request as u; u.urlopen(\"http://127.0.0.1:8081/health\", timeout=2)"'
ENTRYPOINT ["dataloader"]
CMD ["workers"]
