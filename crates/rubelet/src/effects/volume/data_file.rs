//! The files beside mounts that say what was asked for them: `vol_data.json`, `iscsi.json`.
//!
//! Owns: how they are written and read. Nothing is written or read through a link: a driver, or whoever may change the directory,
//! could lead to another volume's file. Never: decides what a file without a meaning stands for.

use std::{io, path::Path};

use rubelet_core::effect::EffectError;
use rubelet_host::port::ReadError;
use serde::{Serialize, de::DeserializeOwned};

use crate::{effects::failure, world::World};

const MODE: u32 = 0o600;
const MAX_BYTES: u64 = 64 * 1024;

pub(super) async fn write<T: Serialize>(world: &World, dir: &Path, name: &str, data: &T) -> Result<(), EffectError> {
    let file = dir.join(name);
    let text = serde_json::to_vec(data).expect("text fields become JSON");
    let written = world.host.write_file_beneath(&world.paths.root_dir, &file, &text, MODE).await;
    written.map_err(|error| failure::io("write", &file, &error))
}

/// `None` if there is none, or one that was lost in a power cut. A link or anything else in its place is an error: what it would
/// say is not known, and a device that is left out is taken for one that is detached.
pub(super) async fn read<T: DeserializeOwned>(world: &World, dir: &Path, name: &str) -> Result<Option<T>, EffectError> {
    let file = dir.join(name);
    // A byte more than allowed tells a file that is too large.
    let read = world.host.read_tail(&world.paths.root_dir, &file, MAX_BYTES.saturating_add(1)).await;
    let text = match read {
        Ok(text) if text.len() as u64 > MAX_BYTES => Err(ReadError::TooLarge { limit_bytes: MAX_BYTES }),
        Err(ReadError::Io(error)) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        read => read,
    };
    let text = text.map_err(|error| failure::io("read", &file, &error))?;
    let data = serde_json::from_slice(&text);
    Ok(data.inspect_err(|error| tracing::info!(file = %file.display(), %error, "ignored an unreadable data file")).ok())
}
