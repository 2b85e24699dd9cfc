//! The reasons of events, which users grep for.
//!
//! Owns: the constants, in upstream's groups and under upstream's names; a reason upstream has and Rubelet never records is not here.
//! Never: the reasons of statuses and conditions; they stand beside the code that computes them.
//! Upstream: `pkg/kubelet/events/event.go`; literals there are marked.

// Containers.
pub const CREATED_CONTAINER: &str = "Created";
pub const STARTED_CONTAINER: &str = "Started";
pub const FAILED_TO_CREATE_CONTAINER: &str = "Failed";
pub const FAILED_TO_START_CONTAINER: &str = "Failed";
pub const KILLING_CONTAINER: &str = "Killing";
/// The reason of the pod's status as well.
pub const PREEMPT_CONTAINER: &str = "Preempting";
pub const BACK_OFF_START_CONTAINER: &str = "BackOff";
/// Rubelet's own: the runtime refuses the removal of a dead container or sandbox again and again.
pub const FAILED_TO_REMOVE: &str = "FailedRemove";
/// Rubelet's own: a dead container's processes were deleted by containerd's own API, since its CRI could not.
pub const DELETED_LEFTOVER_TASK: &str = "DeletedLeftoverTask";

// Pods.
pub const FAILED_TO_KILL_POD: &str = "FailedKillPod";
pub const FAILED_TO_CREATE_POD_CONTAINER: &str = "FailedCreatePodContainer";
pub const FAILED_TO_MAKE_POD_DATA_DIRECTORIES: &str = "Failed";
pub const NETWORK_NOT_READY: &str = "NetworkNotReady";
/// A literal in `pkg/kubelet/eviction/helpers.go`, and the reason of the pod's status as well.
pub const EVICTED: &str = "Evicted";
/// A literal in `pkg/kubelet/active_deadline.go`, and the reason of the pod's status as well.
pub const DEADLINE_EXCEEDED: &str = "DeadlineExceeded";

// Images.
pub const PULLING_IMAGE: &str = "Pulling";
pub const PULLED_IMAGE: &str = "Pulled";
pub const FAILED_TO_PULL_IMAGE: &str = "Failed";
pub const FAILED_TO_INSPECT_IMAGE: &str = "InspectFailed";
pub const ERR_IMAGE_NEVER_PULL_POLICY: &str = "ErrImageNeverPull";
pub const BACK_OFF_PULL_IMAGE: &str = "BackOff";
/// A literal in `pkg/kubelet/kubelet_pods.go`.
pub const FAILED_TO_RETRIEVE_IMAGE_PULL_SECRET: &str = "FailedToRetrieveImagePullSecret";

/// Rubelet's own: what a collection of unused images freed.
pub const DELETED_IMAGES: &str = "DeletedImages";

// The kubelet and its node.
/// A literal in `pkg/kubelet/eviction/eviction_manager.go`.
pub const EVICTION_THRESHOLD_MET: &str = "EvictionThresholdMet";
pub const INVALID_DISK_CAPACITY: &str = "InvalidDiskCapacity";
pub const FREE_DISK_SPACE_FAILED: &str = "FreeDiskSpaceFailed";
pub const IMAGE_GC_FAILED: &str = "ImageGCFailed";
pub const NODE_READY: &str = "NodeReady";
pub const NODE_NOT_READY: &str = "NodeNotReady";
pub const NODE_SCHEDULABLE: &str = "NodeSchedulable";
pub const NODE_NOT_SCHEDULABLE: &str = "NodeNotSchedulable";
/// The events of the pressure conditions are literals in `pkg/kubelet/nodestatus/setters.go`.
pub const NODE_HAS_INSUFFICIENT_MEMORY: &str = "NodeHasInsufficientMemory";
pub const NODE_HAS_DISK_PRESSURE: &str = "NodeHasDiskPressure";
pub const NODE_HAS_INSUFFICIENT_PID: &str = "NodeHasInsufficientPID";
pub const NODE_HAS_SUFFICIENT_MEMORY: &str = "NodeHasSufficientMemory";
pub const NODE_HAS_NO_DISK_PRESSURE: &str = "NodeHasNoDiskPressure";
pub const NODE_HAS_SUFFICIENT_PID: &str = "NodeHasSufficientPID";
pub const STARTING_KUBELET: &str = "Starting";
pub const FAILED_ATTACH_VOLUME: &str = "FailedAttachVolume";
pub const FAILED_MOUNT_VOLUME: &str = "FailedMount";
/// Of a block volume.
pub const FAILED_MAP_VOLUME: &str = "FailedMapVolume";
pub const SUCCESSFUL_MOUNT_VOLUME: &str = "SuccessfulMountVolume";
/// Upstream had it as `FailedUnmountVolume` before it stopped recording it.
pub const VOLUME_RESIZE_FAILED: &str = "VolumeResizeFailed";
pub const FILE_SYSTEM_RESIZE_FAILED: &str = "FileSystemResizeFailed";
pub const FILE_SYSTEM_RESIZE_SUCCESSFUL: &str = "FileSystemResizeSuccessful";
pub const FAILED_UNMOUNT_VOLUME: &str = "FailedUnMount";
/// Another pod of the node has a volume under another `fsGroup`.
pub const ALREADY_MOUNTED_VOLUME: &str = "AlreadyMountedVolume";
/// Many files of a volume are given to the pod's `fsGroup`.
pub const VOLUME_PERMISSION_CHANGE_IN_PROGRESS: &str = "VolumePermissionChangeInProgress";
/// A literal in `pkg/kubelet/server/stats/volume_stat_calculator.go`.
pub const VOLUME_CONDITION_ABNORMAL: &str = "VolumeConditionAbnormal";
/// A literal in `pkg/kubelet/oom/oom_watcher_linux.go`.
pub const SYSTEM_OOM: &str = "SystemOOM";
/// Literals in `pkg/kubelet/podcertificate`; `Denied` and `Failed` are conditions there.
pub const CERTIFICATE_OVERDUE_FOR_REFRESH: &str = "CertificateOverdueForRefresh";
pub const CERTIFICATE_EXPIRED: &str = "CertificateExpired";
pub const NODE_SHUTDOWN: &str = "Shutdown";
pub const NODE_REBOOTED: &str = "Rebooted";
pub const FAILED_NODE_ALLOCATABLE_ENFORCEMENT: &str = "FailedNodeAllocatableEnforcement";
pub const SUCCESSFUL_NODE_ALLOCATABLE_ENFORCEMENT: &str = "NodeAllocatableEnforced";
pub const POSSIBLE_MEMORY_BACKED_VOLUMES_ON_DISK: &str = "PossibleMemoryBackedVolumesOnDisk";
pub const SANDBOX_CHANGED: &str = "SandboxChanged";
pub const FAILED_CREATE_POD_SANDBOX: &str = "FailedCreatePodSandBox";

// Probes.
pub const CONTAINER_UNHEALTHY: &str = "Unhealthy";
pub const CONTAINER_PROBE_WARNING: &str = "ProbeWarning";

// Configuration.
pub const FAILED_VALIDATION: &str = "FailedValidation";
/// Rubelet's own: a manifest's pods run, but something in it is left out.
pub const IGNORED_FIELD: &str = "IgnoredField";
/// Rubelet's own: fields of a pod nothing acts on yet.
pub const UNSUPPORTED_FIELDS: &str = "UnsupportedFields";

// Lifecycle hooks.
pub const FAILED_POST_START_HOOK: &str = "FailedPostStartHook";
pub const FAILED_PRE_STOP_HOOK: &str = "FailedPreStopHook";
/// A literal in `pkg/kubelet/lifecycle/handlers.go`.
pub const LIFECYCLE_HTTP_FALLBACK: &str = "LifecycleHTTPFallback";
