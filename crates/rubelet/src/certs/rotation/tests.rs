//! Renewal in virtual time, against a signer that signs at once.

use std::{path::Path, sync::atomic::AtomicI64};

use proptest::prelude::*;
use rubelet_host::linux::LinuxHost;
use tokio::task::JoinHandle;

use super::*;
use crate::certs::{
    Purpose,
    test_authority::{Signer, start},
};

#[tokio::test(start_paused = true)]
async fn two_minute_certificates_are_renewed_before_they_expire() {
    let dir = tempfile::tempdir().unwrap();
    let (signer, task) = rotating(dir.path(), 120);
    sleep(Duration::from_secs(600)).await;
    task.abort();
    let asked = signer.asked_at.lock().unwrap().clone();
    assert!((6..=8).contains(&asked.len()), "{asked:?}");
    for pair in asked.windows(2) {
        let apart = pair[1].duration_since(pair[0]).as_secs();
        assert!((84..=109).contains(&apart), "{apart} s");
    }
}

#[tokio::test(start_paused = true)]
async fn failed_rotation_backs_off_and_keeps_current_certificate() {
    let dir = tempfile::tempdir().unwrap();
    let (signer, task) = rotating(dir.path(), 3600);
    sleep(Duration::from_secs(10)).await;
    let before = store(dir.path()).current().await.unwrap().unwrap();
    *signer.refusals.lock().unwrap() = 7;
    signer.asked_at.lock().unwrap().clear();
    sleep(Duration::from_secs(3300)).await;
    task.abort();
    let asked = signer.asked_at.lock().unwrap().clone();
    let pauses: Vec<_> = asked.windows(2).take(7).map(|pair| pair[1].duration_since(pair[0]).as_secs()).collect();
    assert_eq!(pauses, [2, 4, 8, 16, 32, 32, 32]);
    let after = store(dir.path()).current().await.unwrap().unwrap();
    assert!(after.not_after > before.not_after);
}

#[tokio::test(start_paused = true)]
async fn certificate_with_other_addresses_is_replaced_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let (signer, task) = rotating(dir.path(), 3600);
    sleep(Duration::from_secs(10)).await;
    task.abort();
    let mut rotation = rotation(dir.path(), signer.clone(), clock());
    rotation.template.ips = vec!["10.0.0.9".parse().unwrap()];
    let task = tokio::spawn(rotation.run());
    sleep(Duration::from_secs(10)).await;
    task.abort();
    assert!(signer.asked_at.lock().unwrap().len() > 1);
}

proptest! {
    #[test]
    fn rotation_is_due_at_70_to_90_percent_of_validity(
        begin in 0_i64..4_000_000_000,
        life in 1_i64..315_360_000,
        jitter in 0.0..=1.0_f64,
    ) {
        let not_before = Timestamp::from_second(begin).unwrap();
        let leaf = Leaf {
            common_name: String::new(),
            organizations: Vec::new(),
            dns_names: Vec::new(),
            ips: Vec::new(),
            not_before,
            not_after: not_before + SignedDuration::from_secs(life),
        };
        let part = due_at(&leaf, jitter).duration_since(not_before).as_secs_f64() / life as f64;
        prop_assert!((0.699_999..=0.900_001).contains(&part), "{}", part);
    }
}

#[test]
fn nodes_and_certificates_are_spread_over_the_whole_time() {
    let dir = tempfile::tempdir().unwrap();
    let clock = clock();
    let jitter = |number: i64| {
        let template = CertificateTemplate::client(&format!("node-{number}"));
        let not_after = start() + SignedDuration::from_secs(number);
        let leaf = Leaf {
            common_name: String::new(),
            organizations: Vec::new(),
            dns_names: Vec::new(),
            ips: Vec::new(),
            not_before: start(),
            not_after,
        };
        let signer = Signer::new(clock.clone(), template.clone(), 60);
        let rotation = Rotation { template, ..rotation(dir.path(), signer, clock.clone()) };
        rotation.jitter(&leaf)
    };
    let mut jitters: Vec<_> = (0..20).map(jitter).collect();
    jitters.sort_by(f64::total_cmp);
    assert!(jitters[0] < 0.2 && jitters[19] > 0.8, "{jitters:?}");
}

fn rotating(dir: &Path, life_secs: i64) -> (Arc<Signer>, JoinHandle<()>) {
    let clock = clock();
    let signer = Signer::new(clock.clone(), CertificateTemplate::client("n1"), life_secs);
    let task = tokio::spawn(rotation(dir, signer.clone(), clock).run());
    (signer, task)
}

fn rotation(dir: &Path, signer: Arc<Signer>, clock: Clock) -> Rotation {
    let template = CertificateTemplate::client("n1");
    let metrics = Arc::default();
    Rotation { api: signer, store: store(dir), template, clock, metrics, user: None, bootstrap_kubeconfig: None }
}

fn store(dir: &Path) -> Store {
    Store::new(Arc::new(LinuxHost::default()), dir, Purpose::Client.prefix())
}

fn clock() -> Clock {
    Clock::simulated(start(), Arc::new(AtomicI64::new(0)))
}
