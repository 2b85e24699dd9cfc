//! The DNS configuration of a pod.
//!
//! Owns: the DNS policies, the limits of resolv.conf. Never: reads the file; its text is an input.
//! Upstream: `pkg/kubelet/network/dns`.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Pod, PodDNSConfig, PodSpec};
use rubelet_cri::v1::DnsConfig;

use super::is_host_network;
use crate::{id::namespace_of, settings::NodeProfile};

pub(crate) const MAX_NAMESERVERS: usize = 3;
const MAX_SEARCHES: usize = 32;
const MAX_SEARCH_LINE_BYTES: usize = 2048;
/// glibc aborts on a longer name.
const MAX_SEARCH_BYTES: usize = 253;

/// `resolv_conf` is the text of the file the node's profile names.
pub fn config(pod: &Pod, spec: &PodSpec, node: &NodeProfile, resolv_conf: &str) -> DnsConfig {
    let mut config = match policy(spec, node) {
        Policy::Nothing => DnsConfig::default(),
        Policy::Cluster => cluster(pod, node, &parse(resolv_conf)),
        Policy::Node if node.resolv_conf.is_none() => localhost(),
        Policy::Node => parse(resolv_conf),
    };
    if let Some(own) = &spec.dns_config {
        add_own(&mut config, own);
    }
    limit(&mut config);
    config
}

enum Policy {
    Nothing,
    Cluster,
    Node,
}

fn policy(spec: &PodSpec, node: &NodeProfile) -> Policy {
    match spec.dns_policy.as_deref() {
        Some("None") => Policy::Nothing,
        Some("Default") => Policy::Node,
        Some("ClusterFirst") if is_host_network(spec) => Policy::Node,
        // Without cluster DNS there is no ClusterFirst; upstream falls back to the node's resolver, too.
        _ if node.cluster_dns.is_empty() => Policy::Node,
        _ => Policy::Cluster,
    }
}

fn cluster(pod: &Pod, node: &NodeProfile, host: &DnsConfig) -> DnsConfig {
    let mut searches = Vec::new();
    if !node.cluster_domain.is_empty() {
        let domain = &node.cluster_domain;
        searches.extend([format!("{}.svc.{domain}", namespace_of(pod)), format!("svc.{domain}"), domain.clone()]);
    }
    searches.extend(host.searches.iter().cloned());
    DnsConfig {
        servers: node.cluster_dns.clone(),
        searches: without_duplicates(searches),
        options: vec!["ndots:5".to_owned()],
    }
}

/// `resolvConf: ""` means no file: like the C library without one, a resolver on localhost.
fn localhost() -> DnsConfig {
    DnsConfig { servers: vec!["127.0.0.1".to_owned()], searches: vec![".".to_owned()], options: Vec::new() }
}

fn parse(resolv_conf: &str) -> DnsConfig {
    let mut config = DnsConfig::default();
    // The last `search` line wins; nameservers and options add up.
    for line in resolv_conf.lines().map(str::trim).filter(|line| !line.starts_with('#')) {
        let mut fields = line.split_whitespace();
        match fields.next() {
            Some("nameserver") => config.servers.extend(fields.next().map(str::to_owned)),
            Some("search") => {
                config.searches = fields
                    .filter(|search| *search != ".")
                    .map(|search| search.strip_suffix('.').unwrap_or(search).to_owned())
                    .collect();
            }
            Some("options") => {
                for option in fields {
                    let name = option.split(':').next();
                    config.options.retain(|known| known.split(':').next() != name);
                    config.options.push(option.to_owned());
                }
            }
            Some(_) | None => {}
        }
    }
    config
}

fn add_own(config: &mut DnsConfig, own: &PodDNSConfig) {
    config.servers.extend(own.nameservers.iter().flatten().cloned());
    config.servers = without_duplicates(std::mem::take(&mut config.servers));
    config.searches.extend(own.searches.iter().flatten().cloned());
    config.searches = without_duplicates(std::mem::take(&mut config.searches));
    let mut options: BTreeMap<String, String> = config
        .options
        .iter()
        .map(|option| {
            let (name, value) = option.split_once(':').unwrap_or((option, ""));
            (name.to_owned(), value.to_owned())
        })
        .collect();
    for option in own.options.iter().flatten() {
        options.insert(option.name.clone().unwrap_or_default(), option.value.clone().unwrap_or_default());
    }
    config.options = options
        .into_iter()
        .map(|(name, value)| if value.is_empty() { name } else { format!("{name}:{value}") })
        .collect();
}

fn limit(config: &mut DnsConfig) {
    config.servers.truncate(MAX_NAMESERVERS);
    config.searches.truncate(MAX_SEARCHES);
    config.searches.retain(|search| search.len() <= MAX_SEARCH_BYTES);
    while config.searches.join(" ").len() > MAX_SEARCH_LINE_BYTES {
        config.searches.pop();
    }
}

fn without_duplicates(all: Vec<String>) -> Vec<String> {
    let mut kept: Vec<String> = Vec::with_capacity(all.len());
    for one in all {
        if !kept.contains(&one) {
            kept.push(one);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    const RESOLV_CONF: &str = "# made by hand\nnameserver 9.9.9.9\nnameserver 8.8.8.8\nsearch old.example\n\
                               search example.com. . corp\noptions ndots:2 timeout:1\noptions ndots:3\n";

    fn resolver(spec: &str, cluster_dns: &[&str]) -> String {
        let pod: Pod =
            serde_json::from_str(&format!(r#"{{"metadata":{{"name":"p","namespace":"prod"}},"spec":{spec}}}"#))
                .unwrap();
        let node = NodeProfile {
            cluster_dns: cluster_dns.iter().map(|&server| server.to_owned()).collect(),
            cluster_domain: "cluster.local".to_owned(),
            ..NodeProfile::default()
        };
        let config = config(&pod, pod.spec.as_ref().unwrap(), &node, RESOLV_CONF);
        format!("{} | {} | {}", config.servers.join(" "), config.searches.join(" "), config.options.join(" "))
    }

    #[test]
    fn policies_choose_between_the_cluster_the_node_and_nothing() {
        let node = "9.9.9.9 8.8.8.8 | example.com corp | timeout:1 ndots:3";
        let cluster = "10.0.0.10 | prod.svc.cluster.local svc.cluster.local cluster.local example.com corp | ndots:5";
        for (spec, cluster_dns, expected) in [
            (r#"{"containers":[],"dnsPolicy":"Default"}"#, &["10.0.0.10"][..], node),
            (r#"{"containers":[],"dnsPolicy":"ClusterFirst"}"#, &["10.0.0.10"], cluster),
            (r#"{"containers":[],"dnsPolicy":"ClusterFirst"}"#, &[], node),
            (r#"{"containers":[],"dnsPolicy":"ClusterFirst","hostNetwork":true}"#, &["10.0.0.10"], node),
            (r#"{"containers":[],"dnsPolicy":"ClusterFirstWithHostNet","hostNetwork":true}"#, &["10.0.0.10"], cluster),
            (
                r#"{"containers":[],"dnsPolicy":"None","dnsConfig":{"nameservers":["1.1.1.1"],"searches":["a","a"],"options":[{"name":"ndots","value":"1"},{"name":"edns0"}]}}"#,
                &["10.0.0.10"],
                "1.1.1.1 | a | edns0 ndots:1",
            ),
            (
                r#"{"containers":[],"dnsPolicy":"Default","dnsConfig":{"nameservers":["1.1.1.1","2.2.2.2"],"options":[{"name":"ndots","value":"1"}]}}"#,
                &[],
                "9.9.9.9 8.8.8.8 1.1.1.1 | example.com corp | ndots:1 timeout:1",
            ),
        ] {
            assert_eq!(resolver(spec, cluster_dns), expected, "{spec}");
        }
    }

    #[test]
    fn search_lines_that_no_resolver_takes_are_cut() {
        let searches: Vec<String> =
            (0..40).map(|n| format!("{n}.{}", "x".repeat(if n == 3 { 260 } else { 90 }))).collect();
        let mut config = DnsConfig { searches, ..DnsConfig::default() };
        limit(&mut config);
        assert!(config.searches.join(" ").len() <= MAX_SEARCH_LINE_BYTES);
        assert_eq!(config.searches.len(), 21);
        assert!(!config.searches.iter().any(|search| search.starts_with("3.")));
    }
}
