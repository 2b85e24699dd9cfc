//! The pages of a node: access through the API server and directly, and no secrets on
//! them or in the agent's log.

use std::{fs, path::Path};

use anyhow::{Context as _, ensure};
use rubelet_testbed::{
    agent::AgentOptions,
    command::{SHORT, capture},
};
use serde_json::json;

use crate::{
    control_plane::bootstrap::TOKEN,
    e2e::{
        cluster::{ClusterCase, ClusterNode, OBEDIENT, Plane, pod, spec},
        secured_port,
    },
};

pub const CASES: &[ClusterCase] = &[
    ClusterCase { name: "each page of a node is for those with just its right", plane: Plane::Shared, run: rights },
    ClusterCase { name: "no secret is in the agent's log or on its pages", plane: Plane::Shared, run: secrets },
];

/// A path, the permissions any of which allows it, and a part of its response.
const PAGES: &[(&str, &[&str], &str)] = &[
    ("/healthz", &["healthz", "proxy"], "ok"),
    ("/pods", &["pods", "proxy"], "\"PodList\""),
    ("/metrics", &["metrics"], "\nkubelet_node_name{"),
    ("/metrics/cadvisor", &["metrics"], "\nmachine_cpu_cores{"),
    // Upstream has no disk summary if it does not know its own disk.
    ("/stats/summary?only_cpu_and_memory=true", &["stats"], "\"nodeName\""),
    ("/configz", &["configz", "proxy"], "\"kubeletconfig\""),
    ("/flagz", &["configz"], "kubelet flagz\nWarning: This endpoint is not meant to be machine parseable"),
    ("/statusz", &["statusz"], "Emulation version"),
    ("/logs/", &["log"], "<!doctype html>\n<meta name=\"viewport\" content=\"width=device-width\">\n<pre>\n"),
    ("/logs/no-such-file", &["log"], "404 page not found\n"),
    ("/containerLogs/none/none/none", &["proxy"], "pod \"none\" does not exist"),
];

fn rights(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    cluster.start()?;
    for (path, _, said) in PAGES.iter().filter(|(path, ..)| !path.contains("no")) {
        // With the API server's own client certificate.
        let body = cluster.kubectl(&["get", "--raw", &format!("/api/v1/nodes/{}/proxy{path}", cluster.name)])?;
        ensure!(body.contains(said), "{path} through the API server: {body}");
    }
    let all = ["healthz", "pods", "configz", "statusz", "log", "proxy", "metrics", "stats"];
    let mut cases: Vec<&[&str]> = PAGES.iter().map(|(_, rights, _)| *rights).collect();
    cases.dedup();
    for (number, needed) in cases.iter().enumerate() {
        let others: Vec<&str> = all.iter().copied().filter(|right| !needed.contains(right)).collect();
        let stranger = account(cluster, &format!("without-{number}"), &others)?;
        for right in *needed {
            let friend = account(cluster, &format!("with-{number}-{right}"), &[right])?;
            for (path, _, said) in PAGES.iter().filter(|(_, rights, _)| rights == needed) {
                let (status, body) = secured_port::get(&cluster.node.agent, path, Some(&friend))?;
                ensure!(status != 401 && status != 403 && body.contains(said), "{path} with {right}: {status} {body}");
                let (status, body) = secured_port::get(&cluster.node.agent, path, Some(&stranger))?;
                ensure!(
                    status == 403 && body.starts_with("Forbidden (user="),
                    "{path} with {others:?}: {status} {body}"
                );
            }
        }
    }
    Ok(())
}

/// A service account with these permissions on nodes, and its token.
pub fn account(cluster: &ClusterNode, name: &str, rights: &[&str]) -> anyhow::Result<String> {
    let (group, role) = ("rbac.authorization.k8s.io", format!("{}-{name}", cluster.name));
    let resources: Vec<String> = rights.iter().map(|right| format!("nodes/{right}")).collect();
    cluster.apply(json!({ "apiVersion": "v1", "kind": "ServiceAccount", "metadata": { "name": name } }))?;
    cluster.plane().apply(&json!({
        "apiVersion": format!("{group}/v1"), "kind": "ClusterRole", "metadata": { "name": role },
        "rules": [{ "apiGroups": [""], "resources": resources, "verbs": ["get"] }],
    }))?;
    cluster.plane().apply(&json!({
        "apiVersion": format!("{group}/v1"), "kind": "ClusterRoleBinding", "metadata": { "name": role },
        "roleRef": { "apiGroup": group, "kind": "ClusterRole", "name": role },
        "subjects": [{ "kind": "ServiceAccount", "name": name, "namespace": cluster.name }],
    }))?;
    Ok(cluster.kubectl(&["create", "token", name])?.trim().to_owned())
}

const IN_ENVIRONMENT: &str = "canary-of-the-environment";
const IN_FILE: &str = "canary-of-a-file";
const OF_REGISTRY: &str = "canary-of-a-registry";
/// The header that the testbed's agents send to the server of a URL.
const OF_URL: &str = "secret-of-the-test";

fn secrets(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    let membership = cluster.membership_by_token()?;
    let options = AgentOptions {
        cluster: Some(membership.clone()),
        url: Some("http://127.0.0.1:9/pods".to_owned()),
        verbosity: Some(10),
        ..AgentOptions::default()
    };
    cluster.node.reconfigure(&options)?;
    cluster.start()?;
    let auth = json!({ "auths": { "127.0.0.1:9": { "username": "u", "password": OF_REGISTRY } } });
    cluster.apply_all(vec![
        json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "canaries" },
            "stringData": { "env": IN_ENVIRONMENT, "file": IN_FILE } }),
        json!({ "apiVersion": "v1", "kind": "Secret", "metadata": { "name": "registry" },
            "type": "kubernetes.io/dockerconfigjson", "stringData": { ".dockerconfigjson": auth.to_string() } }),
    ])?;
    let mut web = spec(&cluster.name, OBEDIENT);
    web["volumes"] = json!([{ "name": "files", "projected": { "sources": [
        { "secret": { "name": "canaries" } }, { "serviceAccountToken": { "path": "token" } }] } }]);
    web["containers"][0]["env"] =
        json!([{ "name": "CANARY", "valueFrom": { "secretKeyRef": { "name": "canaries", "key": "env" } } }]);
    web["containers"][0]["volumeMounts"] = json!([{ "name": "files", "mountPath": "/files" }]);
    let mut broken = spec(&cluster.name, OBEDIENT);
    broken["containers"][0]["image"] = json!("127.0.0.1:9/none:latest");
    broken["imagePullSecrets"] = json!([{ "name": "registry" }]);
    cluster.apply_all(vec![pod("web", &web), pod("broken", &broken)])?;
    let uid = cluster.wait_running("web", 60)?.uid().to_owned();
    cluster.wait("the other's pull has failed", 60, |cluster| {
        let seen = cluster.pod("broken")?;
        ensure!(seen.status().to_string().contains("ErrImagePull"), "{}", seen.status());
        Ok(())
    })?;
    let volume = cluster.node.agent.root_dir().join(format!("pods/{uid}/volumes/kubernetes.io~projected/files"));
    let of_pod = fs::read_to_string(volume.join("token")).context("the pod's token")?;
    let rights = ["pods", "configz", "statusz", "log", "healthz", "proxy", "metrics", "stats"];
    let of_caller = account(cluster, "caller", &rights)?;
    let key = key_of(&membership.kubeconfig)?;
    // Its first half is an identifier, which is not secret.
    let (_, to_join) = TOKEN.split_once('.').context("a token of two halves")?;
    let canaries = [IN_ENVIRONMENT, IN_FILE, OF_REGISTRY, OF_URL, of_pod.trim(), &of_caller, &key, to_join];

    let said = all_that_is_said(cluster, &of_caller)?;
    let is_upstream = cluster.node.agent.is_upstream();
    for (place, text) in &said {
        for canary in canaries {
            // Upstream shows the headers of its URL on `/configz` and logs them.
            if is_upstream && canary == OF_URL {
                continue;
            }
            ensure!(!tells(text, canary), "{place} has {canary:.30}…: {}", around(text, canary));
        }
    }
    let log_bytes = said.last().map_or(0, |(_, log)| log.len());
    ensure!(log_bytes > 100_000, "at this verbosity there is more to say than {log_bytes} bytes");
    // Upstream removes no pod before its URL has responded once.
    if is_upstream {
        return Ok(());
    }
    let deleted = capture(&mut cluster.kubectl_command(&["delete", "pod", "web", "broken"]), SHORT)?;
    ensure!(deleted.success, "{deleted:?}");
    cluster.wait_none(30)
}

/// The agent's outputs and their contents; its log last.
fn all_that_is_said(cluster: &ClusterNode, token: &str) -> anyhow::Result<Vec<(String, String)>> {
    let mut said = Vec::new();
    let more = ["/healthz?verbose", "/runningpods/", "/metrics/resource", "/metrics/probes", "/metrics/slis"];
    for path in PAGES.iter().map(|(path, ..)| *path).chain(more) {
        said.push((path.to_owned(), secured_port::get(&cluster.node.agent, path, Some(token))?.1));
    }
    said.push(("events".to_owned(), cluster.kubectl(&["get", "events", "-o", "json"])?));
    if !cluster.node.agent.is_upstream() {
        for args in [&["pods", "-o", "json"][..], &["events"], &["explain", "web"], &["explain", "broken"]] {
            said.push((args.join(" "), cluster.node.agent.ask(args)?));
        }
    }
    said.push(("the agent's log".to_owned(), fs::read_to_string(cluster.node.agent.log())?));
    Ok(said)
}

/// The longest line of the key that a kubeconfig names.
fn key_of(kubeconfig: &Path) -> anyhow::Result<String> {
    let text = fs::read_to_string(kubeconfig)?;
    let named = text.split("client-key").nth(1).with_context(|| format!("no key is named in {text}"))?;
    let path = named.trim_start_matches([':', '"', ' ']).split(['"', '\n', ',']).next().unwrap_or_default();
    let pem = fs::read_to_string(path).with_context(|| format!("the key {path}"))?;
    // The certificate may be in the same file.
    let line = pem.split("PRIVATE KEY-----").nth(1).and_then(|key| key.lines().max_by_key(|line| line.len()));
    line.map(str::to_owned).with_context(|| format!("{path} holds no key"))
}

/// Whether the text contains it, plain or in base64 at any offset.
fn tells(text: &str, canary: &str) -> bool {
    text.contains(canary) || base64_cores(canary).iter().any(|core| text.contains(core))
}

fn around<'a>(text: &'a str, canary: &str) -> &'a str {
    let line = text.lines().find(|line| tells(line, canary)).unwrap_or_default();
    let end = line.char_indices().nth(600).map_or(line.len(), |(at, _)| at);
    &line[..end]
}

/// The base64 of the middle of a text, for each of its three alignments.
fn base64_cores(text: &str) -> Vec<String> {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let encode = |bytes: &[u8]| {
        let groups = bytes.chunks_exact(3).map(|group| u32::from_be_bytes([0, group[0], group[1], group[2]]));
        groups.flat_map(|bits| [18, 12, 6, 0].map(|shift| char::from(DIGITS[(bits >> shift) as usize & 63]))).collect()
    };
    (0..3).filter_map(|start| text.as_bytes().get(start..)).map(encode).collect()
}
