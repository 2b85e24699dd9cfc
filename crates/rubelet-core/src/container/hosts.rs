//! A pod's `/etc/hosts` and hostname.
//!
//! Owns: the text of the managed hosts file, the pod's hostname and domain. Never: writes the file.
//! Upstream: `kubelet_pods.go` (`managedHostsFileContent`, `GeneratePodHostNameAndDomain`), `util.GetNodenameForKernel`.

use std::fmt::Write as _;

use k8s_openapi::api::core::v1::{HostAlias, Pod, PodSpec};

use super::{ConfigError, is_host_network, spec};
use crate::id::{name_of, namespace_of};

pub const HOSTS_PATH: &str = "/etc/hosts";
/// The kernel's field holds 64 bytes, one of them the end.
const HOSTNAME_MAX_BYTES: usize = 63;
const FQDN_MAX_BYTES: usize = 64;

/// Upstream mounts a hosts file once the pod has an address, or when it uses the host network.
pub fn is_managed(spec: &PodSpec, pod_ips: &[String]) -> bool {
    !pod_ips.is_empty() || is_host_network(spec)
}

/// `node_hosts` is the node's own file; a host network pod gets a copy of it.
pub fn content(pod: &Pod, pod_ips: &[String], cluster_domain: &str, node_hosts: &str) -> Result<String, ConfigError> {
    let spec = spec(pod)?;
    let mut text = String::new();
    if is_host_network(spec) {
        text.push_str("# Kubernetes-managed hosts file (host network).\n");
        text.push_str(node_hosts);
    } else {
        let (hostname, domain) = hostname_and_domain(pod, cluster_domain)?;
        text.push_str("# Kubernetes-managed hosts file.\n");
        text.push_str("127.0.0.1\tlocalhost\n");
        text.push_str("::1\tlocalhost ip6-localhost ip6-loopback\n");
        text.push_str("fe00::0\tip6-localnet\n");
        text.push_str("fe00::0\tip6-mcastprefix\n");
        text.push_str("fe00::1\tip6-allnodes\n");
        text.push_str("fe00::2\tip6-allrouters\n");
        for ip in pod_ips {
            if domain.is_empty() {
                let _ = writeln!(text, "{ip}\t{hostname}");
            } else {
                let _ = writeln!(text, "{ip}\t{hostname}.{domain}\t{hostname}");
            }
        }
    }
    add_aliases(&mut text, spec.host_aliases.as_deref().unwrap_or_default());
    Ok(text)
}

/// The hostname of the sandbox's UTS namespace.
pub fn kernel_hostname(pod: &Pod, cluster_domain: &str) -> Result<String, ConfigError> {
    let (hostname, domain) = hostname_and_domain(pod, cluster_domain)?;
    if domain.is_empty() || spec(pod)?.set_hostname_as_fqdn != Some(true) {
        return Ok(hostname);
    }
    let fqdn = format!("{hostname}.{domain}");
    if fqdn.len() > FQDN_MAX_BYTES {
        return Err(ConfigError(format!(
            "failed to construct FQDN from pod hostname and cluster domain, FQDN {fqdn} is too long ({FQDN_MAX_BYTES} \
             characters is the max, {} characters requested)",
            fqdn.len()
        )));
    }
    Ok(fqdn)
}

fn hostname_and_domain(pod: &Pod, cluster_domain: &str) -> Result<(String, String), ConfigError> {
    let spec = spec(pod)?;
    if let Some(hostname) = &spec.hostname_override {
        return Ok((truncated(pod, hostname)?, String::new()));
    }
    let hostname = spec.hostname.as_deref().filter(|hostname| !hostname.is_empty()).unwrap_or_else(|| name_of(pod));
    let domain = match spec.subdomain.as_deref() {
        None | Some("") => String::new(),
        Some(subdomain) => format!("{subdomain}.{}.svc.{cluster_domain}", namespace_of(pod)),
    };
    Ok((truncated(pod, hostname)?, domain))
}

fn truncated(pod: &Pod, hostname: &str) -> Result<String, ConfigError> {
    let Some(head) = hostname.get(..HOSTNAME_MAX_BYTES.min(hostname.len())) else {
        return Err(ConfigError(format!("hostname for pod {:?} was invalid: {hostname:?}", name_of(pod))));
    };
    if head.len() == hostname.len() {
        return Ok(hostname.to_owned());
    }
    let head = head.trim_end_matches(['-', '.']);
    if head.is_empty() {
        return Err(ConfigError(format!("hostname for pod {:?} was invalid: {hostname:?}", name_of(pod))));
    }
    Ok(head.to_owned())
}

fn add_aliases(text: &mut String, aliases: &[HostAlias]) {
    if aliases.is_empty() {
        return;
    }
    text.push_str("\n# Entries added by HostAliases.\n");
    for alias in aliases {
        let _ = writeln!(text, "{}\t{}", alias.ip, alias.hostnames.as_deref().unwrap_or_default().join("\t"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(spec: &str) -> Pod {
        serde_json::from_str(&format!(r#"{{"metadata":{{"name":"web","namespace":"prod"}},"spec":{spec}}}"#)).unwrap()
    }

    #[test]
    fn hosts_file_names_the_pod_under_each_of_its_addresses() {
        let pod = pod(r#"{"containers":[],"subdomain":"svc","hostAliases":[{"ip":"1.2.3.4","hostnames":["a","b"]}]}"#);
        let ips = ["10.0.0.5".to_owned(), "fd00::5".to_owned()];
        insta::assert_snapshot!(content(&pod, &ips, "cluster.local", "").unwrap(), @r"
        # Kubernetes-managed hosts file.
        127.0.0.1	localhost
        ::1	localhost ip6-localhost ip6-loopback
        fe00::0	ip6-localnet
        fe00::0	ip6-mcastprefix
        fe00::1	ip6-allnodes
        fe00::2	ip6-allrouters
        10.0.0.5	web.svc.prod.svc.cluster.local	web
        fd00::5	web.svc.prod.svc.cluster.local	web

        # Entries added by HostAliases.
        1.2.3.4	a	b
        ");
    }

    #[test]
    fn host_network_pods_get_a_copy_of_the_nodes_hosts_file() {
        let pod = pod(r#"{"containers":[],"hostNetwork":true}"#);
        assert_eq!(
            content(&pod, &[], "cluster.local", "127.0.0.1 localhost\n").unwrap(),
            "# Kubernetes-managed hosts file (host network).\n127.0.0.1 localhost\n"
        );
    }

    #[test]
    fn hostnames_follow_the_spec_and_are_cut_at_63_bytes() {
        let long = format!("{}-tail", "a".repeat(62));
        for (spec, expected) in [
            (r#"{"containers":[]}"#.to_owned(), Ok("web".to_owned())),
            (r#"{"containers":[],"hostname":"h"}"#.to_owned(), Ok("h".to_owned())),
            (r#"{"containers":[],"hostname":"h","subdomain":"s"}"#.to_owned(), Ok("h".to_owned())),
            (
                r#"{"containers":[],"hostname":"h","subdomain":"s","setHostnameAsFQDN":true}"#.to_owned(),
                Ok("h.s.prod.svc.cluster.local".to_owned()),
            ),
            (
                r#"{"containers":[],"hostname":"h","hostnameOverride":"o.example"}"#.to_owned(),
                Ok("o.example".to_owned()),
            ),
            (format!(r#"{{"containers":[],"hostname":"{long}"}}"#), Ok("a".repeat(62))),
        ] {
            assert_eq!(kernel_hostname(&pod(&spec), "cluster.local"), expected, "{spec}");
        }
        let too_long =
            format!(r#"{{"containers":[],"hostname":"{}","subdomain":"s","setHostnameAsFQDN":true}}"#, "a".repeat(60));
        assert!(kernel_hostname(&pod(&too_long), "cluster.local").is_err());
    }
}
