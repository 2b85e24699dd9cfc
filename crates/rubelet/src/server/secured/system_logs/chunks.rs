//! A file as a streamed body.

use std::{fs::File, io, os::unix::fs::FileExt as _, sync::Arc};

use bytes::Bytes;
use futures_util::{Stream, stream};
use rubelet_host::threads::for_caller;

const CHUNK_BYTES: u64 = 64 << 10;

/// From `from` to before `to`, or to the end of the file.
pub(super) fn chunks(file: File, from: u64, to: u64) -> impl Stream<Item = io::Result<Bytes>> + Send {
    let file = Arc::new(file);
    stream::try_unfold(from, move |at| {
        let file = file.clone();
        async move {
            let wanted = usize::try_from(to.saturating_sub(at).min(CHUNK_BYTES)).unwrap_or(0);
            let read = for_caller(move || {
                let mut chunk = vec![0; wanted];
                let count = file.read_at(&mut chunk, at)?;
                chunk.truncate(count);
                io::Result::Ok(chunk)
            });
            let chunk = read.await?;
            let next = at + chunk.len() as u64;
            Ok((!chunk.is_empty()).then(|| (Bytes::from(chunk), next)))
        }
    })
}
