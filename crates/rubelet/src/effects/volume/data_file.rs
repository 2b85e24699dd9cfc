//! The files beside mounts that say what was asked for them: `vol_data.json`, `iscsi.json`.
//!
//! Owns: how they are written and read. Nothing is written or read through a link: a driver, or whoever may change the directory,
//! could lead to another volume's file. Never: decides what a file without a meaning stands for.

use std::{io, path::Path};

use rubelet_core::effect::EffectError;
use rubelet_host::port::ReadError;
use rustix::io::Errno;
use serde::{Serialize, de::DeserializeOwned};

use crate::{effects::failure, world::World};

const MODE: u32 = 0o600;
const MAX_BYTES: usize = 64 * 1024;

pub(super) async fn write<T: Serialize>(world: &World, dir: &Path, name: &str, data: &T) -> Result<(), EffectError> {
    let file = dir.join(name);
    let text = serde_json::to_vec(data).expect("text fields become JSON");
    let written = world.host.write_file_beneath(&world.paths.root_dir, &file, &text, MODE).await;
    written.map_err(|error| failure::io("write", &file, &error))
}

/// `None` if there is none, or none that can be read as one: it was lost in a power cut, or somebody else put it there.
pub(super) async fn read<T: DeserializeOwned>(world: &World, dir: &Path, name: &str) -> Result<Option<T>, EffectError> {
    let file = dir.join(name);
    // A byte more than allowed tells a file that is too large.
    let limit_bytes = MAX_BYTES as u64 + 1;
    let why = match world.host.read_tail(&world.paths.root_dir, &file, limit_bytes).await {
        Ok(text) if text.len() > MAX_BYTES => format!("it is larger than the limit of {MAX_BYTES} bytes"),
        Ok(text) => match serde_json::from_slice(&text) {
            Ok(data) => return Ok(Some(data)),
            Err(error) => error.to_string(),
        },
        Err(ReadError::Io(error)) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(ReadError::Io(error)) if !is_a_link(&error) => return Err(failure::io("read", &file, &error)),
        Err(error) => error.to_string(),
    };
    tracing::info!(file = %file.display(), error = why, "ignored an unreadable data file");
    Ok(None)
}

/// The file, or a directory on the way.
fn is_a_link(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::LOOP | Errno::NOTDIR))
}
