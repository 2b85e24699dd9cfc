//! The program of the sandbox container: it waits, and reaps what is orphaned when the pod shares a process namespace.
//!
//! Built by `cargo xtask` with `rustc`, static, as the only file of the testbed's pause image.

use std::{ffi::c_int, ptr};

const SIGINT: c_int = 2;
const SIGTERM: c_int = 15;
const SIGCHLD: c_int = 17;
const WNOHANG: c_int = 1;

unsafe extern "C" {
    fn signal(number: c_int, handler: extern "C" fn(c_int)) -> usize;
    fn waitpid(pid: c_int, status: *mut c_int, options: c_int) -> c_int;
    fn pause() -> c_int;
    fn _exit(code: c_int) -> !;
}

/// As process 1 it gets no signal it does not handle.
extern "C" fn stop(_number: c_int) {
    // SAFETY: async-signal-safe by POSIX.
    unsafe { _exit(0) }
}

extern "C" fn reap(_number: c_int) {
    // SAFETY: async-signal-safe by POSIX; a null status is allowed.
    while unsafe { waitpid(-1, ptr::null_mut(), WNOHANG) } > 0 {}
}

fn main() {
    // SAFETY: the handlers above only make async-signal-safe calls.
    unsafe {
        signal(SIGINT, stop);
        signal(SIGTERM, stop);
        signal(SIGCHLD, reap);
    }
    loop {
        // SAFETY: takes nothing, touches nothing.
        unsafe { pause() };
    }
}
