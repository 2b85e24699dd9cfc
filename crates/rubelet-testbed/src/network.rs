//! The pods' network: a bridge and a subnet per testbed.
//!
//! Owns: the bridge and the CNI configuration. We create the bridge, not the CNI plugin: its name claims
//! a subnet, since the kernel gives a name only once, and nothing enables forwarding or writes iptables rules.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr},
};

use anyhow::Context as _;
use serde_json::json;

use crate::{
    Layout,
    command::{SHORT, capture, command, output},
};

pub fn set_up(layout: &Layout) -> anyhow::Result<()> {
    let network = claim(layout)?;
    let bridge = format!("rubelet{network}");
    let gateway = format!("10.213.{network}.1");
    output(&mut command("ip", ["addr", "replace", &format!("{gateway}/24"), "dev", &bridge]), SHORT)?;
    output(&mut command("ip", ["link", "set", &bridge, "up"]), SHORT)?;
    let config = json!({
        "cniVersion": "1.0.0",
        "name": bridge,
        "plugins": [{
            "type": "bridge",
            "bridge": bridge,
            "ipam": {
                "type": "host-local",
                "dataDir": layout.dir.join("cni/ipam"),
                "ranges": [[{ "subnet": format!("10.213.{network}.0/24"), "gateway": gateway }]],
                "routes": [{ "dst": "0.0.0.0/0" }],
            },
        }],
    });
    let dir = layout.dir.join("cni/net.d");
    fs::create_dir_all(&dir)?;
    fs::write(dir.join("10-rubelet.conflist"), serde_json::to_string_pretty(&config)?)?;
    Ok(())
}

/// The machine's address on the bridge, different for every testbed.
pub fn address(layout: &Layout) -> anyhow::Result<Ipv4Addr> {
    Ok(Ipv4Addr::new(10, 213, number_of(&fs::read_to_string(layout.bridge_file())?)?, 1))
}

/// Gives the machine one more address, which goes with the bridge.
pub fn add_address(layout: &Layout, ip: IpAddr) -> anyhow::Result<()> {
    let bridge = fs::read_to_string(layout.bridge_file())?;
    let (ip, how): (_, &[&str]) = match ip {
        IpAddr::V4(ip) => (format!("{ip}/32"), &[]),
        IpAddr::V6(ip) => (format!("{ip}/128"), &["nodad"]),
    };
    output(command("ip", ["addr", "add", &ip, "dev", bridge.trim()]).args(how), SHORT)?;
    Ok(())
}

fn number_of(bridge: &str) -> anyhow::Result<u8> {
    bridge.trim().trim_start_matches("rubelet").parse().context("the name of our bridge")
}

/// The number of our bridge: the existing one, or the first that is free.
fn claim(layout: &Layout) -> anyhow::Result<u8> {
    if let Ok(bridge) = fs::read_to_string(layout.bridge_file()) {
        let number = number_of(&bridge)?;
        if capture(&mut command("ip", ["link", "show", bridge.trim()]), SHORT)?.success || add(bridge.trim())? {
            return Ok(number);
        }
    }
    for number in 0..=255 {
        let bridge = format!("rubelet{number}");
        if add(&bridge)? {
            fs::write(layout.bridge_file(), &bridge)?;
            return Ok(number);
        }
    }
    anyhow::bail!("all of rubelet0 to rubelet255 are taken")
}

fn add(bridge: &str) -> anyhow::Result<bool> {
    let out = capture(&mut command("ip", ["link", "add", bridge, "type", "bridge"]), SHORT)?;
    if !out.success && !out.stderr.contains("File exists") {
        anyhow::bail!("cannot make bridge {bridge}: {}", out.stderr.trim());
    }
    Ok(out.success)
}
