//! The node's addresses.
//!
//! Owns: `--node-ip`, or the address from the node's name or the kernel's routes. It sends nothing but DNS queries.
//! Upstream: `nodestatus.NodeAddress`, `validateNodeIP`, `ResolveBindAddress`.

use std::{
    net::{IpAddr, SocketAddr, UdpSocket},
    time::Duration,
};

use anyhow::Context as _;

/// A slower resolver must not delay the node; the kernel's routes answer at once.
const LOOKUP_TIMEOUT: Duration = Duration::from_secs(2);
/// Documentation addresses: routed like any other, in use nowhere.
const PROBES: [(&str, &str); 2] = [("0.0.0.0:0", "192.0.2.1:9"), ("[::]:0", "[2001:db8::1]:9")];

/// Where the node's address comes from without `--node-ip`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// First the DNS address of the node's name, as in a cluster.
    ResolverAndRoutes,
    /// A standalone node.
    Routes,
}

/// Primary first; a second one only if `--node-ip` names two. Empty on a node without a network.
pub async fn host_ips(told: &str, node_name: &str, ask: Ask) -> anyhow::Result<Vec<String>> {
    let told_ips = parse(told)?;
    let prefers_v6 = told_ips.first().is_some_and(IpAddr::is_ipv6);
    if names_an_address(told) {
        let strangers = told_ips.iter().filter(|ip| !is_of_this_node(**ip));
        for ip in strangers {
            tracing::warn!("--node-ip: {ip} is not reachable from other nodes");
        }
        return Ok(told_ips.iter().filter(|ip| !ip.is_unspecified()).map(ToString::to_string).collect());
    }
    if let Ok(ip) = node_name.parse::<IpAddr>() {
        return Ok(vec![ip.to_string()]);
    }
    let mut named = match ask {
        Ask::ResolverAndRoutes => resolved(node_name).await,
        Ask::Routes => Vec::new(),
    };
    named.sort_by_key(|ip| ip.is_ipv6() != prefers_v6);
    let found = named.into_iter().next().or_else(|| routed(prefers_v6));
    Ok(found.map(|ip| ip.to_string()).into_iter().collect())
}

/// Whether `--node-ip` gives an address and not just a family (`0.0.0.0`, `::`).
pub fn names_an_address(told: &str) -> bool {
    parse(told).is_ok_and(|ips| ips.first().is_some_and(|ip| !ip.is_unspecified()))
}

fn parse(told: &str) -> anyhow::Result<Vec<IpAddr>> {
    let ips = told.split(',').map(str::trim).filter(|ip| !ip.is_empty()).map(str::parse);
    ips.collect::<Result<_, _>>().with_context(|| format!("--node-ip: {told:?} is not an IP address"))
}

async fn resolved(node_name: &str) -> Vec<IpAddr> {
    let lookup = tokio::net::lookup_host((node_name, 0));
    match tokio::time::timeout(LOOKUP_TIMEOUT, lookup).await {
        Ok(Ok(addresses)) => addresses.map(|address| address.ip()).filter(|ip| is_of_this_node(*ip)).collect(),
        Ok(Err(_)) | Err(_) => Vec::new(),
    }
}

/// The source address of routes to others. A route lookup sends no packet.
fn routed(prefers_v6: bool) -> Option<IpAddr> {
    let mut probes = PROBES;
    if prefers_v6 {
        probes.reverse();
    }
    probes.iter().find_map(|(from, to)| {
        let socket = UdpSocket::bind(from).ok()?;
        socket.connect(to).ok()?;
        Some(socket.local_addr().ok()?.ip())
    })
}

fn is_of_this_node(ip: IpAddr) -> bool {
    let is_link_local = match ip {
        IpAddr::V4(ip) => ip.is_link_local(),
        IpAddr::V6(ip) => ip.is_unicast_link_local(),
    };
    let is_reachable = !ip.is_loopback() && !ip.is_multicast() && !ip.is_unspecified() && !is_link_local;
    is_reachable && UdpSocket::bind(SocketAddr::new(ip, 0)).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn node_ip_list_keeps_order_and_unspecified_names_no_address() {
        let ips = host_ips("10.0.0.7, fd00::7", "n", Ask::Routes).await.unwrap();
        assert_eq!(ips, ["10.0.0.7", "fd00::7"]);
        assert!(names_an_address("10.0.0.7"));
        assert!(!names_an_address("::") && !names_an_address(""));
        let error = host_ips("10.0.0", "n", Ask::Routes).await.unwrap_err();
        assert_eq!(error.to_string(), "--node-ip: \"10.0.0\" is not an IP address");
    }

    #[tokio::test]
    async fn a_node_named_by_its_address_has_that_address() {
        assert_eq!(host_ips("", "192.0.2.77", Ask::Routes).await.unwrap(), ["192.0.2.77"]);
    }

    #[test]
    fn unreachable_addresses_are_not_node_addresses() {
        for ip in ["127.0.0.1", "224.0.0.1", "169.254.1.1", "0.0.0.0", "::1", "192.0.2.1"] {
            assert!(!is_of_this_node(ip.parse().unwrap()), "{ip}");
        }
    }
}
