//! Probes on a node without descriptors. A program of its own: the limit is the whole process's.

use std::{io, net::TcpListener, time::Duration};

use rubelet_host::{
    linux::LinuxHost,
    port::{CheckError, GrpcCheck, GrpcFailure, Host as _, HttpCheck, TcpCheck},
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

#[tokio::test]
async fn missing_descriptors_differ_from_a_refused_connection() {
    let host = LinuxHost::default();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let timeout = Duration::from_secs(1);
    let before = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: Some(1), maximum: before.maximum }).unwrap();
    let connect = TcpCheck { pod: "pod".into(), host: "127.0.0.1".to_owned(), port, timeout };
    let tcp = host.check_tcp(&connect).await;
    let check = HttpCheck { pod: "pod".into(), url: format!("http://127.0.0.1:{port}/"), headers: Vec::new(), timeout };
    let http = host.check_http(&check).await;
    let check = GrpcCheck { host: "127.0.0.1".to_owned(), port, timeout, ..GrpcCheck::default() };
    let grpc = host.check_grpc(&check).await;
    setrlimit(Resource::Nofile, before).unwrap();

    let message = format!("dial tcp 127.0.0.1:{port}: connect: too many open files");
    let error = tcp.unwrap_err();
    assert_eq!((error.kind(), error.to_string()), (io::ErrorKind::OutOfMemory, message.clone()));
    assert!(matches!(http, Err(CheckError::Io(error)) if error.kind() == io::ErrorKind::OutOfMemory));
    assert_eq!(grpc, Err(GrpcFailure::Exhausted(message)));
    let refused = host.check_tcp(&connect).await.unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
}
