//! A metrics-server beside a control plane, the backend of `kubectl top`.
//!
//! Owns: its account, with the permissions of its manifests, and its APIService. It is a process of
//! this machine instead of a pod, so that its result depends only on the agent's metrics.

use std::{
    net::{Ipv4Addr, TcpStream},
    path::Path,
    process::Command,
};

use anyhow::Context as _;
use rubelet_testbed::{command::command, free_port, go_tools};
use serde_json::{Value, json};

use crate::control_plane::{ControlPlane, kubeconfig::Credential};

/// The names of its account and service, from its manifests.
const NAME: &str = "metrics-server";

impl ControlPlane {
    /// Starts one on an address of this machine and waits until the API server proxies requests to it. Endpoints may not
    /// be on the loopback interface.
    pub fn start_metrics_server(&mut self, address: Ipv4Addr) -> anyhow::Result<()> {
        let program = go_tools::ensure(&[go_tools::METRICS_SERVER])?.join(NAME);
        let main = go_tools::METRICS_SERVER.source_dir("sigs.k8s.io/metrics-server/cmd/metrics-server")?;
        let manifests = main.ancestors().nth(2).context("the root of metrics-server's module")?.join("manifests/base");
        let manifest = |name: &str| format!("--filename={}", manifests.join(name).display());
        self.kubectl(&["apply", &manifest("rbac.yaml")])?;
        let port = free_port()?;
        let mut server = self.metrics_server_command(&program, address, port)?;
        self.run(NAME, &mut server)?;
        self.wait("metrics-server listens", |_| Ok(TcpStream::connect((address, port)).map(drop)?))?;
        self.apply(&endpoints(address, port))?;
        self.kubectl(&["apply", &manifest("service.yaml"), &manifest("apiservice.yaml")])?;
        self.wait("the API server knows metrics-server", |plane| {
            plane.api().get("/apis/metrics.k8s.io/v1beta1").map(drop)
        })
    }

    fn metrics_server_command(&self, program: &Path, address: Ipv4Addr, port: u16) -> anyhow::Result<Command> {
        let token = self.kubectl(&["--namespace=kube-system", "create", "token", NAME])?;
        let kubeconfig = self.dir().join("metrics-server.kubeconfig");
        self.write_kubeconfig(&kubeconfig, &Credential::Token(token.trim()))?;
        let flag = |name: &str, value: &Path| format!("--{name}={}", value.display());
        Ok(command(
            program,
            [
                flag("kubeconfig", &kubeconfig),
                flag("authentication-kubeconfig", &kubeconfig),
                flag("authorization-kubeconfig", &kubeconfig),
                flag("cert-dir", &self.dir().join("metrics-server-pki")),
                format!("--bind-address={address}"),
                format!("--secure-port={port}"),
                "--kubelet-preferred-address-types=InternalIP".to_owned(),
                "--kubelet-use-node-status-port".to_owned(),
                // Agents sign their own serving certificates here.
                "--kubelet-insecure-tls".to_owned(),
                // The minimum; a scrape must end well before the next.
                "--metric-resolution=10s".to_owned(),
                "--kubelet-request-timeout=9s".to_owned(),
            ],
        ))
    }
}

/// The endpoints of its service, which selects no pods.
fn endpoints(address: Ipv4Addr, port: u16) -> Value {
    json!({
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": NAME,
            "namespace": "kube-system",
            "labels": { "kubernetes.io/service-name": NAME },
        },
        "addressType": "IPv4",
        "endpoints": [{ "addresses": [address], "conditions": { "ready": true } }],
        "ports": [{ "name": "https", "port": port, "protocol": "TCP" }],
    })
}
