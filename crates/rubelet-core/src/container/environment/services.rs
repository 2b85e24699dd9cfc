//! Service environment variables.
//!
//! Owns: which services a pod sees, and the names of their variables, Docker's links among them.
//! Upstream: `getServiceEnvVarMap`, `pkg/kubelet/envvars`.

use std::{collections::BTreeMap, net::Ipv6Addr};

use super::Variables;
use crate::objects::Service;

/// All services of the cluster, by namespace and name.
pub type ServiceMap = BTreeMap<(String, String), Service>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Links {
    /// Every service of the pod's namespace.
    All,
    /// Only the API server's.
    Master,
}

/// The variables of the services a pod of this namespace sees. The API server's is always included.
pub fn variables(services: &ServiceMap, namespace: &str, links: Links) -> Variables {
    let mut environment = Variables::new();
    let master = ("default".to_owned(), "kubernetes".to_owned());
    if let Some(service) = services.get(&master) {
        describe(&master.1, service, &mut environment);
    }
    if links == Links::All {
        let own = services.range((namespace.to_owned(), String::new())..);
        for ((_, name), service) in own.take_while(|((of, _), _)| of == namespace) {
            describe(name, service, &mut environment);
        }
    }
    environment
}

fn describe(name: &str, service: &Service, environment: &mut Variables) {
    let prefix = variable_name(name);
    let mut set = |name: String, value: String| environment.insert(name, value.into_bytes());
    set(format!("{prefix}_SERVICE_HOST"), service.cluster_ip.clone());
    for (index, port) in service.ports.iter().enumerate() {
        let number = port.port.to_string();
        let protocol = port.protocol.to_lowercase();
        let url = format!("{protocol}://{}", host_port(&service.cluster_ip, &number));
        if index == 0 {
            set(format!("{prefix}_SERVICE_PORT"), number.clone());
            set(format!("{prefix}_PORT"), url.clone());
        }
        if !port.name.is_empty() {
            set(format!("{prefix}_SERVICE_PORT_{}", variable_name(&port.name)), number.clone());
        }
        let link = format!("{prefix}_PORT_{number}_{}", port.protocol.to_uppercase());
        set(link.clone(), url);
        set(format!("{link}_PROTO"), protocol);
        set(format!("{link}_PORT"), number);
        set(format!("{link}_ADDR"), service.cluster_ip.clone());
    }
}

fn variable_name(name: &str) -> String {
    name.replace('-', "_").to_uppercase()
}

fn host_port(ip: &str, port: &str) -> String {
    if ip.parse::<Ipv6Addr>().is_ok() { format!("[{ip}]:{port}") } else { format!("{ip}:{port}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::objects::ServicePort;

    fn service(ip: &str, ports: &[(&str, i32, &str)]) -> Service {
        let ports = ports.iter().map(|&(name, port, protocol)| ServicePort {
            name: name.to_owned(),
            port,
            protocol: protocol.to_owned(),
        });
        Service { cluster_ip: ip.to_owned(), ports: ports.collect() }
    }

    fn shown(services: &[(&str, &str, Service)], namespace: &str, links: Links) -> String {
        let services = services
            .iter()
            .map(|(namespace, name, service)| (((*namespace).to_owned(), (*name).to_owned()), service.clone()));
        let variables = variables(&services.collect(), namespace, links);
        let lines: Vec<String> =
            variables.iter().map(|(name, value)| format!("{name}={}", String::from_utf8_lossy(value))).collect();
        lines.join("\n")
    }

    /// The table of upstream's `TestFromServices`.
    #[test]
    fn variables_are_named_as_upstream_names_them() {
        let services = [
            ("test", "foo-bar", service("1.2.3.4", &[("", 8080, "TCP")])),
            ("test", "abc-123", service("5.6.7.8", &[("u-d-p", 8081, "UDP"), ("t-c-p", 8081, "TCP")])),
            ("test", "q-u-u-x", service("9.8.7.6", &[("", 8082, "TCP"), ("8083", 8083, "TCP")])),
            ("test", "super-ipv6", service("2001:DB8::", &[("u-d-p", 8084, "UDP"), ("t-c-p", 8084, "TCP")])),
            ("test", "sctp-1", service("1.2.3.4", &[("", 777, "SCTP")])),
        ];
        insta::assert_snapshot!(shown(&services, "test", Links::All), @"
        ABC_123_PORT=udp://5.6.7.8:8081
        ABC_123_PORT_8081_TCP=tcp://5.6.7.8:8081
        ABC_123_PORT_8081_TCP_ADDR=5.6.7.8
        ABC_123_PORT_8081_TCP_PORT=8081
        ABC_123_PORT_8081_TCP_PROTO=tcp
        ABC_123_PORT_8081_UDP=udp://5.6.7.8:8081
        ABC_123_PORT_8081_UDP_ADDR=5.6.7.8
        ABC_123_PORT_8081_UDP_PORT=8081
        ABC_123_PORT_8081_UDP_PROTO=udp
        ABC_123_SERVICE_HOST=5.6.7.8
        ABC_123_SERVICE_PORT=8081
        ABC_123_SERVICE_PORT_T_C_P=8081
        ABC_123_SERVICE_PORT_U_D_P=8081
        FOO_BAR_PORT=tcp://1.2.3.4:8080
        FOO_BAR_PORT_8080_TCP=tcp://1.2.3.4:8080
        FOO_BAR_PORT_8080_TCP_ADDR=1.2.3.4
        FOO_BAR_PORT_8080_TCP_PORT=8080
        FOO_BAR_PORT_8080_TCP_PROTO=tcp
        FOO_BAR_SERVICE_HOST=1.2.3.4
        FOO_BAR_SERVICE_PORT=8080
        Q_U_U_X_PORT=tcp://9.8.7.6:8082
        Q_U_U_X_PORT_8082_TCP=tcp://9.8.7.6:8082
        Q_U_U_X_PORT_8082_TCP_ADDR=9.8.7.6
        Q_U_U_X_PORT_8082_TCP_PORT=8082
        Q_U_U_X_PORT_8082_TCP_PROTO=tcp
        Q_U_U_X_PORT_8083_TCP=tcp://9.8.7.6:8083
        Q_U_U_X_PORT_8083_TCP_ADDR=9.8.7.6
        Q_U_U_X_PORT_8083_TCP_PORT=8083
        Q_U_U_X_PORT_8083_TCP_PROTO=tcp
        Q_U_U_X_SERVICE_HOST=9.8.7.6
        Q_U_U_X_SERVICE_PORT=8082
        Q_U_U_X_SERVICE_PORT_8083=8083
        SCTP_1_PORT=sctp://1.2.3.4:777
        SCTP_1_PORT_777_SCTP=sctp://1.2.3.4:777
        SCTP_1_PORT_777_SCTP_ADDR=1.2.3.4
        SCTP_1_PORT_777_SCTP_PORT=777
        SCTP_1_PORT_777_SCTP_PROTO=sctp
        SCTP_1_SERVICE_HOST=1.2.3.4
        SCTP_1_SERVICE_PORT=777
        SUPER_IPV6_PORT=udp://[2001:DB8::]:8084
        SUPER_IPV6_PORT_8084_TCP=tcp://[2001:DB8::]:8084
        SUPER_IPV6_PORT_8084_TCP_ADDR=2001:DB8::
        SUPER_IPV6_PORT_8084_TCP_PORT=8084
        SUPER_IPV6_PORT_8084_TCP_PROTO=tcp
        SUPER_IPV6_PORT_8084_UDP=udp://[2001:DB8::]:8084
        SUPER_IPV6_PORT_8084_UDP_ADDR=2001:DB8::
        SUPER_IPV6_PORT_8084_UDP_PORT=8084
        SUPER_IPV6_PORT_8084_UDP_PROTO=udp
        SUPER_IPV6_SERVICE_HOST=2001:DB8::
        SUPER_IPV6_SERVICE_PORT=8084
        SUPER_IPV6_SERVICE_PORT_T_C_P=8084
        SUPER_IPV6_SERVICE_PORT_U_D_P=8084
        ");
    }

    #[test]
    fn a_pod_sees_its_own_namespace_and_always_the_api_server() {
        let services = [
            ("default", "kubernetes", service("10.0.0.1", &[("https", 443, "TCP")])),
            ("default", "other", service("10.0.0.2", &[("", 80, "TCP")])),
            ("prod", "db", service("10.0.0.3", &[("", 5432, "TCP")])),
        ];
        let hosts = |namespace, links| {
            let shown = shown(&services, namespace, links);
            shown.lines().filter(|line| line.contains("_HOST")).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(hosts("prod", Links::All), "DB_SERVICE_HOST=10.0.0.3 KUBERNETES_SERVICE_HOST=10.0.0.1");
        assert_eq!(hosts("prod", Links::Master), "KUBERNETES_SERVICE_HOST=10.0.0.1");
        assert_eq!(hosts("default", Links::All), "KUBERNETES_SERVICE_HOST=10.0.0.1 OTHER_SERVICE_HOST=10.0.0.2");
    }

    #[test]
    fn a_service_of_the_pods_own_namespace_hides_the_api_servers() {
        let services = [
            ("default", "kubernetes", service("10.0.0.1", &[("", 443, "TCP")])),
            ("prod", "kubernetes", service("10.0.0.9", &[("", 443, "TCP")])),
        ];
        let shown = shown(&services, "prod", Links::All);
        assert!(shown.contains("KUBERNETES_SERVICE_HOST=10.0.0.9"), "{shown}");
    }
}
