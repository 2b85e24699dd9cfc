//! The container hash, which detects a changed definition.
//!
//! Owns: the hash in annotation `io.kubernetes.container.hash`. Never: uses fields that upstream leaves out, or every container
//! would restart when a node switches between the two agents.
//! Upstream: `container.HashContainer`.

use k8s_openapi::api::core::v1::Container;
use serde::Serialize;

use super::go_json;
use crate::fnv::fnv32a;

/// Equal to upstream's for the same name and image.
pub fn hash(container: &Container) -> u64 {
    let picked = Picked { image: container.image.as_deref().unwrap_or_default(), name: &container.name };
    let json = go_json::to_string(&picked);
    // Upstream hashes the output of its debug printer, not the bytes.
    let mut printed = String::with_capacity(16 + json.len() * 4);
    printed.push_str("([]uint8)[");
    for (position, byte) in json.bytes().enumerate() {
        if position > 0 {
            printed.push(' ');
        }
        printed.push_str(&byte.to_string());
    }
    printed.push(']');
    u64::from(fnv32a(printed.as_bytes()))
}

/// The form in the annotation.
pub fn to_text(hash: u64) -> String {
    format!("{hash:x}")
}

pub fn from_text(text: &str) -> Option<u64> {
    u64::from_str_radix(text, 16).ok()
}

/// Fields in the order of Go's sorted map keys.
#[derive(Serialize)]
struct Picked<'a> {
    image: &'a str,
    name: &'a str,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Printed by upstream v1.36.3's own `HashContainer`.
    const UPSTREAM: [(&str, &str, u64); 14] = [
        ("", "", 0xedd67cc4),
        ("a", "", 0x33f2e30),
        ("", "busybox", 0xd834ddea),
        ("web", "nginx:1.27", 0xe220f96),
        ("web", "registry.k8s.io/pause:3.10.2", 0x4add7794),
        (
            "etcd",
            "registry.k8s.io/etcd@sha256:22f892d7672adc0b9c86df67792afdb8b2dc08880f49f669eaaa59c47d7908c2",
            0x9f6964ef,
        ),
        ("kube-apiserver", "registry.k8s.io/kube-apiserver:v1.36.3", 0x75fd0cc4),
        ("ünï", "bild/ü:日本", 0x49a8bf70),
        ("q\"uote", "back\\slash", 0x104f2058),
        ("html", "<a&b>", 0xf0322c37),
        ("ctl", "tab\tnl\nbell\u{7}\u{7f}", 0xeaa588ca),
        ("sep", "\u{2028}\u{2029}", 0xbbfd6f0e),
        ("emoji", "😀", 0x90a1a0f6),
        ("bs", "\u{8}\u{c}\r\0", 0xa004c0a3),
    ];

    #[test]
    fn hashes_equal_upstreams() {
        for (name, image, expected) in UPSTREAM {
            let container = Container { name: name.to_owned(), image: Some(image.to_owned()), ..Container::default() };
            assert_eq!(to_text(hash(&container)), to_text(expected), "{name:?} {image:?}");
        }
    }

    #[test]
    fn text_of_a_hash_reads_back() {
        assert_eq!(from_text(&to_text(0x33f2e30)), Some(0x33f2e30));
        assert_eq!(from_text("not hex"), None);
    }
}
