# An image with allranks. In a checkout: docker build --tag allranks .
#
# CUDA: as it stands. On x86-64 the torch that pip installs brings CUDA with it, and the image needs no
#       more than the driver of its host: docker run --gpus all allranks doctor --gpus
# CPU:  --build-arg TORCH_INDEX=ADDRESS, the index of CPU builds that torch's page "Get started" names.
#       The image is smaller by gigabytes.
#
# No test builds it, for CI reaches no images; tests/test_containers.py runs its commands with
# stand-ins for apt-get and pip, and holds it to allranks.def.
FROM python:3.11-slim
ARG TORCH_INDEX=
WORKDIR /opt/allranks
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src ./src
# g++ compiles the extensions, and what --compile writes; ip and ssh are for jobs on several nodes.
RUN set -e; \
    apt-get update; \
    apt-get install --yes --no-install-recommends g++ iproute2 openssh-client; \
    pip install --no-cache-dir --constraint constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch; \
    pip install --no-cache-dir --constraint constraints.txt '.[digits]'
WORKDIR /work
ENTRYPOINT ["allranks"]
CMD ["--help"]
