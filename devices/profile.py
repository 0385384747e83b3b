"""The hardware profile of a device, and the plan for training on it. Reads nothing: `detect` fills in the values.

None in a field means "unavailable": the device did not report it. It is never replaced by a zero or a guess.
"""

from enum import Enum

from fedcg.errors import FedcgError
from fedcg.values import Value


class NotTrainableError(FedcgError):
    """The device can't train. The message has the reason and the alternative."""


MIB = 1 << 20
GIB = 1 << 30

# A training process needs memory for torch, the data and an ONNX export: 380 MB measured for small networks. The rest is for agent and system.
LEAST_TRAINING_BYTES = 768 * MIB
# A CUDA context and its libraries take several hundred MB before the first tensor. With less memory than this, the CPU is the better choice.
LEAST_GPU_BYTES = 2 * GIB
# The PyTorch builds accepted by the `learn` extra have no kernels for older GPUs.
LEAST_COMPUTE_CAPABILITY = (5, 0)
# More threads don't speed up networks of this size at small batches. One core stays free for networking and the system.
MOST_CPU_THREADS = 4
# With a GPU, the CPU only feeds it.
GPU_FEEDING_THREADS = 2


class DeviceKind(str, Enum):
    """The three supported kinds of devices."""

    JETSON = "jetson"
    CUDA = "cuda"
    CPU = "cpu"


class L4tRelease(Value):
    """Release of Jetson Linux (L4T).

    Attributes:
        major: 36 in R36.4.3.
        revision: "4.3" in R36.4.3.
    """

    major: int
    revision: str

    def __str__(self) -> str:
        return f"{self.major}.{self.revision}"


class Gpu(Value):
    """The first NVIDIA GPU of the device.

    Attributes:
        name: From the driver.
        memory_bytes: Its own memory, or the shared memory with `shares_memory`.
        compute_capability: (major, minor).
        driver: Driver version.
        shares_memory: True on a Jetson, where CPU and GPU use the same memory.
    """

    name: str
    memory_bytes: int | None
    compute_capability: tuple[int, int] | None
    driver: str | None
    shares_memory: bool = False


class Trainable(Value):
    """Whether the device can train, and why (not)."""

    possible: bool
    reason: str


class Builds(Value):
    """The builds of torch and onnxruntime that use a Jetson's GPU, for one JetPack.

    Attributes:
        soc: its system on chip, as in the catalogue.
        jetson_linux: major releases of Jetson Linux in this JetPack.
        python: version of the system's Python.
        torch, onnxruntime: the build and its origin; "unknown" without a source.
        source: of this information.
    """

    soc: str
    jetpack: int
    jetson_linux: tuple[int, ...]
    python: str
    torch: str
    onnxruntime: str
    source: str

    @property
    def system(self) -> str:
        """NVIDIA's two names for the system, with version numbers."""
        return f"JetPack {self.jetpack} (Jetson Linux {' or '.join(map(str, self.jetson_linux))})"


class DeviceProfile(Value):
    """The hardware of a device.

    Attributes:
        kind: jetson, cuda or cpu.
        model: Product or board name.
        cpu_model: Name of the processor.
        architecture: e.g. "x86_64", "aarch64".
        cpus: CPUs that this process may use (online, affinity, cgroup quota).
        memory_bytes: Memory that this process may use (installed, cgroup limit).
        gpu: The first NVIDIA GPU; None without a GPU.
        l4t: Release of Jetson Linux, Jetson only.
        trainable: Whether the device can train, with the reason.
        known_as: Its entry in the catalogue, if the device-tree names one.
        builds: The torch and onnxruntime builds that use its GPU; None if unknown, and for devices other than Jetson.
    """

    kind: DeviceKind
    model: str | None
    cpu_model: str | None
    architecture: str | None
    cpus: int | None
    memory_bytes: int | None
    gpu: Gpu | None
    l4t: L4tRelease | None
    trainable: Trainable
    known_as: str | None = None
    builds: Builds | None = None


class TrainingPlan(Value):
    """Where and how large to train.

    Attributes:
        device: torch device: "cpu", "cuda" or "cuda:N".
        threads: Threads for torch on the CPU, at least 1.
        batch_scale: Share of the batch that fits into the installed memory with a margin, in (0, 1].
        reason: The reason, for the log and the owner.
    """

    device: str
    threads: int
    batch_scale: float
    reason: str


def plan_training(
    profile: DeviceProfile, *, device: str = "auto", threads: int | None = None, gpu_problem: str = ""
) -> TrainingPlan:
    """Choose place and size of the training on this device.

    Args:
        profile: From `detect`.
        device: "auto" chooses by the profile; "cpu", "cuda" or "cuda:N" is the owner's choice.
        threads: The owner's number of threads; None or 0 chooses by the profile.
        gpu_problem: Why the installed torch can't use a GPU, with the remedy; empty if it can.

    Raises:
        NotTrainableError: If `device` is "auto" and the device can't train, or if the owner's choice is not possible.
    """
    if device == "auto" and not profile.trainable.possible:
        raise NotTrainableError(
            f"this device can't train: {profile.trainable.reason}. "
            'To train anyway, set device = "cpu" under [training] in the configuration.'
        )
    if device.startswith("cuda") and gpu_problem:
        raise NotTrainableError(f'device = "{device}" under [training] can\'t be used: {gpu_problem}')
    place, reason = _place(profile, device, gpu_problem)
    return TrainingPlan(
        device=place,
        threads=threads or _threads(profile, place),
        batch_scale=batch_share(profile, place),
        reason=reason,
    )


def gpu_obstacle(gpu: Gpu | None) -> str | None:
    """Why a GPU can't be used for training, or None if it can."""
    if gpu is None:
        return "no NVIDIA GPU was found"
    if gpu.compute_capability is not None and gpu.compute_capability < LEAST_COMPUTE_CAPABILITY:
        have, need = (".".join(map(str, pair)) for pair in (gpu.compute_capability, LEAST_COMPUTE_CAPABILITY))
        return f"{gpu.name} has compute capability {have}, training needs {need}"
    if gpu.memory_bytes is not None and gpu.memory_bytes < LEAST_GPU_BYTES:
        return f"{gpu.name} has {gpu.memory_bytes // MIB} MiB of memory, training needs {LEAST_GPU_BYTES // MIB} MiB"
    return None


def _place(profile: DeviceProfile, device: str, gpu_problem: str) -> tuple[str, str]:
    if device != "auto":
        return device, f"{device} is set in the configuration"
    obstacle = gpu_obstacle(profile.gpu) or gpu_problem or None
    if profile.gpu is None or obstacle is not None:
        return "cpu", str(obstacle)
    return "cuda", f"{profile.gpu.name} can be used for training"


def _threads(profile: DeviceProfile, place: str) -> int:
    if profile.cpus is None:
        return 1
    if place != "cpu":
        return max(1, min(GPU_FEEDING_THREADS, profile.cpus))
    return max(1, min(MOST_CPU_THREADS, profile.cpus - 1))


def batch_share(profile: DeviceProfile, place: str, free_bytes: int | None = None) -> float:
    """The share of the batch that fits into memory with a margin, in (0, 1].

    Args:
        profile: From `detect`.
        place: The torch device.
        free_bytes: Available bytes of the same memory. They are doubled, because the limits are for installed memory, of which the system and
            other programs may use half. None: use only the installed memory.
    """
    installed = profile.gpu.memory_bytes if place != "cpu" and profile.gpu is not None else profile.memory_bytes
    known = [size for size in (installed, None if free_bytes is None else 2 * free_bytes) if size is not None]
    if not known:
        return 1.0
    memory = min(known)
    # GPU memory also holds the context and, on a Jetson, the whole system.
    roomy, tight = (6 * GIB, 3 * GIB) if place != "cpu" else (2 * GIB, 1 * GIB)
    if memory >= roomy:
        return 1.0
    return 0.5 if memory >= tight else 0.25


UNAVAILABLE = "unavailable"


def gib(memory_bytes: int | None) -> str:
    """A size as text."""
    return UNAVAILABLE if memory_bytes is None else f"{memory_bytes / GIB:.1f} GiB"


def describe_gpu(gpu: Gpu | None) -> str:
    """A GPU as text."""
    if gpu is None:
        return "none found"
    capability = ".".join(map(str, gpu.compute_capability)) if gpu.compute_capability else UNAVAILABLE
    shared = " (shared with the CPU)" if gpu.shares_memory else ""
    return f"{gpu.name}, memory {gib(gpu.memory_bytes)}{shared}, compute capability {capability}, driver {gpu.driver or UNAVAILABLE}"
