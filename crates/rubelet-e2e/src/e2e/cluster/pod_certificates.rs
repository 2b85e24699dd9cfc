//! Certificates of pods in volumes, where their gate is on. The test is the signer.

use std::{fs, path::PathBuf};

use anyhow::{Context as _, ensure};
use rubelet_testbed::{
    agent::AgentOptions,
    command::{SHORT, command, output},
};
use serde_json::{Map, Value, json};

use crate::{
    control_plane::{ControlPlaneOptions, certificates::Authority},
    e2e::cluster::{ClusterCase, ClusterNode, OBEDIENT, Plane, csi::exec, csi::spec_with, pod},
};

pub const CASES: &[ClusterCase] = &[ClusterCase {
    name: "a pod gets the certificate that a signer issues for its key, and is told when one is denied",
    plane: Plane::Own(with_requests),
    run: certificates,
}];

fn with_requests() -> ControlPlaneOptions {
    ControlPlaneOptions {
        feature_gates: Some("PodCertificateRequest=true"),
        runtime_config: Some("certificates.k8s.io/v1beta1/podcertificaterequests=true"),
        ..ControlPlaneOptions::default()
    }
}

const SIGNER: &str = "example.com/signer";

fn certificates(cluster: &mut ClusterNode) -> anyhow::Result<()> {
    let mut config = Map::new();
    config.insert("featureGates".to_owned(), json!({ "PodCertificateRequest": true }));
    let options = AgentOptions { cluster: Some(cluster.membership()?), config, ..AgentOptions::default() };
    cluster.node.reconfigure(&options)?;
    cluster.start()?;
    let dir = cluster.node.bed.layout.dir.join("signer");
    fs::create_dir_all(&dir)?;
    let signer = Signer { authority: Authority::open(&dir)?, dir };
    let key_types = ["ECDSAP256", "ECDSAP521", "ED25519", "RSA4096"];
    let names = key_types.map(str::to_ascii_lowercase);
    for (name, key_type) in names.iter().zip(key_types) {
        // The API server checks the proof with every request.
        cluster.apply(pod(name, &wanting(cluster, key_type)))?;
        let (request, spec) = pending(cluster, name)?;
        ensure!(spec["signerName"] == SIGNER && spec["nodeName"] == cluster.name.as_str(), "{spec}");
        signer.issue(cluster, &request, &spec)?;
        cluster.wait_running(name, 60)?;
        let seen = exec(cluster, name, "cat /identity/both.pem")?;
        let again = exec(cluster, name, "cat /identity/key.pem /identity/chain.pem")?;
        ensure!(seen == again, "{name}: the files differ");
        signer.check(&seen).with_context(|| format!("{name} has {seen}"))?;
    }
    cluster.apply(pod("refused", &wanting(cluster, "ECDSAP384")))?;
    let (request, _) = pending(cluster, "refused")?;
    let condition = json!({ "type": "Denied", "status": "True", "reason": "Unknown", "message": "not you" });
    decide(cluster, &request, condition, json!({}))?;
    cluster.wait("the pod says that its certificate was denied", 60, |cluster| {
        let fields = "--field-selector=involvedObject.name=refused";
        let events = cluster.kubectl(&["get", "events", fields, "-o", "json"])?;
        ensure!(events.contains("\"FailedMount\"") && events.contains("permanently denied"), "{events}");
        Ok(())
    })?;
    cluster.kubectl(&["delete", "pod", "--all"])?;
    cluster.wait_none(60)
}

fn wanting(cluster: &ClusterNode, key_type: &str) -> Value {
    let source = json!({
        "signerName": SIGNER, "keyType": key_type, "maxExpirationSeconds": 172_800, "credentialBundlePath": "both.pem",
        "keyPath": "key.pem", "certificateChainPath": "chain.pem",
    });
    let volume = json!({ "name": "identity", "projected": { "sources": [{ "podCertificate": source }] } });
    let mut spec = spec_with(cluster, OBEDIENT, &[volume]);
    spec["nodeName"] = json!(cluster.name);
    spec
}

/// The name and the spec of the request for a pod.
fn pending(cluster: &ClusterNode, pod: &str) -> anyhow::Result<(String, Value)> {
    let path = format!("/apis/certificates.k8s.io/v1beta1/namespaces/{}/podcertificaterequests", cluster.name);
    cluster.wait("the agent requests a certificate", 60, |cluster| {
        let requests = cluster.plane().api().list(&path)?;
        let request = requests.iter().find(|request| request["spec"]["podName"] == pod);
        let request = request.with_context(|| format!("requests: {requests:?}"))?;
        let name = request["metadata"]["name"].as_str().context("an object has a name")?;
        Ok((name.to_owned(), request["spec"].clone()))
    })
}

fn decide(cluster: &ClusterNode, request: &str, mut condition: Value, status: Value) -> anyhow::Result<()> {
    condition["lastTransitionTime"] = json!("2026-01-01T00:00:00Z");
    let mut status = status;
    status["conditions"] = json!([condition]);
    let (object, patch) = (format!("podcertificaterequest/{request}"), json!({ "status": status }).to_string());
    cluster.kubectl(&["patch", &object, "--subresource=status", "--type=merge", "--patch", &patch])?;
    Ok(())
}

struct Signer {
    authority: Authority,
    dir: PathBuf,
}

impl Signer {
    fn openssl(args: &[&str]) -> anyhow::Result<String> {
        output(&mut command("openssl", args), SHORT)
    }

    fn place(&self, name: &str) -> String {
        self.dir.join(name).display().to_string()
    }

    fn issue(&self, cluster: &ClusterNode, request: &str, spec: &Value) -> anyhow::Result<()> {
        let stub = spec["stubPKCS10Request"].as_str().context("a request has a stub")?;
        let (encoded, stub_file) = (self.place("stub.b64"), self.place("stub.der"));
        fs::write(&encoded, stub)?;
        Self::openssl(&["base64", "-d", "-A", "-in", &encoded, "-out", &stub_file])?;
        let (ca, key) =
            (self.authority.certificate().display().to_string(), self.authority.key().display().to_string());
        let issued = self.place("issued.pem");
        let signing = ["x509", "-req", "-inform", "DER", "-in", &stub_file, "-days", "1", "-CA", &ca, "-CAkey", &key];
        Self::openssl(&[&signing[..], &["-CAcreateserial", "-out", &issued]].concat())?;
        let dates = Self::openssl(&["x509", "-in", &issued, "-noout", "-dates", "-dateopt", "iso_8601"])?;
        let date = |name: &str| {
            let line = dates.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
            line.map(|text| text.replace(' ', "T")).with_context(|| format!("no {name}: {dates}"))
        };
        let (not_before, not_after) = (date("notBefore")?, date("notAfter")?);
        // Any time between them; the last hours of a day are.
        let begin = not_after.replacen('Z', "", 1);
        let begin: jiff::civil::DateTime = begin.parse()?;
        let begin = format!("{}Z", begin.checked_sub(jiff::SignedDuration::from_hours(4))?);
        let chain = format!("noise\n{}", fs::read_to_string(&issued)?);
        let condition = json!({ "type": "Issued", "status": "True", "reason": "Known", "message": "welcome" });
        let status = json!({
            "certificateChain": chain, "notBefore": not_before, "notAfter": not_after, "beginRefreshAt": begin,
        });
        decide(cluster, request, condition, status)
    }

    /// The key of a bundle is that of its certificate, which this authority signed.
    fn check(&self, bundle: &str) -> anyhow::Result<()> {
        let file = self.place("bundle.pem");
        fs::write(&file, bundle)?;
        let of_key = Self::openssl(&["pkey", "-in", &file, "-pubout"])?;
        let of_certificate = Self::openssl(&["x509", "-in", &file, "-noout", "-pubkey"])?;
        ensure!(of_key == of_certificate, "{of_key} {of_certificate}");
        let ca = self.authority.certificate().display().to_string();
        Self::openssl(&["verify", "-CAfile", &ca, &file])?;
        ensure!(!bundle.contains("noise"), "the chain was not cleaned");
        Ok(())
    }
}
