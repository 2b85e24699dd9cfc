//! The programs of a control plane: built from their modules, or from `KUBEBUILDER_ASSETS`.

use std::path::{Path, PathBuf};

use rubelet_testbed::go_tools::{self, GoTool};

#[derive(Clone, Debug)]
pub struct ClusterPrograms {
    pub etcd: PathBuf,
    pub apiserver: PathBuf,
    pub controller_manager: PathBuf,
    pub scheduler: PathBuf,
    pub kubectl: PathBuf,
}

impl ClusterPrograms {
    /// Builds what is missing.
    pub fn ensure() -> anyhow::Result<Self> {
        let assets = std::env::var_os("KUBEBUILDER_ASSETS").map(PathBuf::from).filter(|dir| is_complete(dir));
        let own = [go_tools::KUBE_CONTROLLER_MANAGER, go_tools::KUBE_SCHEDULER];
        let given = [go_tools::ETCD, go_tools::KUBE_APISERVER, go_tools::KUBECTL];
        let wanted: Vec<GoTool> = match &assets {
            Some(_) => own.to_vec(),
            None => given.into_iter().chain(own).collect(),
        };
        let bin = go_tools::ensure(&wanted)?;
        let given = assets.as_ref().unwrap_or(&bin);
        Ok(ClusterPrograms {
            etcd: given.join("etcd"),
            apiserver: given.join("kube-apiserver"),
            kubectl: given.join("kubectl"),
            controller_manager: bin.join("kube-controller-manager"),
            scheduler: bin.join("kube-scheduler"),
        })
    }
}

/// Upstream's kubelet, for comparison.
pub fn upstream_kubelet() -> anyhow::Result<PathBuf> {
    Ok(go_tools::ensure(&[go_tools::KUBELET])?.join("kubelet"))
}

fn is_complete(dir: &Path) -> bool {
    ["etcd", "kube-apiserver", "kubectl"].iter().all(|program| dir.join(program).is_file())
}
