//! containerd's configuration, for each version.

use std::fs;

use crate::{CgroupDriver, Layout, Programs, Runtime};

pub fn write_config(layout: &Layout, programs: &Programs, driver: CgroupDriver) -> anyhow::Result<()> {
    let is_systemd = driver == CgroupDriver::Systemd;
    let text = match programs.runtime {
        Runtime::Debian16 => debian16(layout, programs, is_systemd),
        Runtime::Containerd24 => containerd24(layout, programs, is_systemd),
    };
    fs::write(layout.containerd_config(), text)?;
    Ok(())
}

/// `restrict_oom_score_adj`: inside a container the right to lower it may be missing.
fn debian16(layout: &Layout, programs: &Programs, is_systemd: bool) -> String {
    let dir = layout.dir.display();
    let runc = programs.runc.display();
    let cni = programs.cni_dir.display();
    format!(
        r#"version = 2
root = "{dir}/root"
state = "{dir}/state"

[grpc]
  address = "{dir}/containerd.sock"

[plugins."io.containerd.internal.v1.opt"]
  path = "{dir}/opt"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "registry.k8s.io/pause:3.6"
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true

[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "{cni}"
  conf_dir = "{dir}/cni/net.d"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
  BinaryName = "{runc}"
  Root = "{dir}/state/runc"
  SystemdCgroup = {is_systemd}
"#
    )
}

fn containerd24(layout: &Layout, programs: &Programs, is_systemd: bool) -> String {
    let dir = layout.dir.display();
    let runc = programs.runc.display();
    let cni = programs.cni_dir.display();
    format!(
        r#"version = 3
root = "{dir}/root"
state = "{dir}/state"

[grpc]
  address = "{dir}/containerd.sock"

[plugins."io.containerd.internal.v1.opt"]
  path = "{dir}/opt"

# Its socket would be the machine's, not ours.
[plugins."io.containerd.nri.v1.nri"]
  disable = true

[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "registry.k8s.io/pause:3.10.2"

[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
  netns_mounts_under_state_dir = true

[plugins."io.containerd.cri.v1.runtime".cni]
  bin_dirs = ["{cni}"]
  conf_dir = "{dir}/cni/net.d"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
  BinaryName = "{runc}"
  Root = "{dir}/state/runc"
  SystemdCgroup = {is_systemd}

# The same under another name, for RuntimeClasses; what it runs is told by where it keeps its state.
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.second]
  runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.second.options]
  BinaryName = "{runc}"
  Root = "{dir}/state/second"
  SystemdCgroup = {is_systemd}
"#
    )
}
