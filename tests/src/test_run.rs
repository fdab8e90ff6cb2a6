//! Runs of a program on one frame, by `BPF_PROG_TEST_RUN`.
use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd},
};

const BPF_PROG_TEST_RUN: libc::c_long = 10;
/// `struct __sk_buff`: its length, and where `gso_size` is.
const CONTEXT_LEN: usize = 192;
const GSO_SIZE: usize = 176;
/// Largest number of bytes that a program may put in front of a frame.
const ROOM: usize = 64;

/// The part of `union bpf_attr` that the command reads.
#[repr(C)]
#[derive(Default)]
struct TestRun {
    prog_fd: u32,
    retval: u32,
    data_size_in: u32,
    data_size_out: u32,
    data_in: u64,
    data_out: u64,
    repeat: u32,
    duration: u32,
    ctx_size_in: u32,
    ctx_size_out: u32,
    ctx_in: u64,
    ctx_out: u64,
    flags: u32,
    cpu: u32,
    batch_size: u32,
    pad: u32,
}

/// Result of runs of a program.
#[derive(Debug)]
pub struct Ran {
    /// Return value of the last run.
    pub action: i32,
    /// The frame as the last run left it.
    pub frame: Vec<u8>,
    /// Mean time of a run, ns.
    pub mean_ns: u32,
}

/// Runs a program on a frame `repeat` times, each on what the run before left. `gso_size`: 0 for a
/// frame that is one packet.
///
/// # Errors
/// The kernel refuses the run.
pub fn test_run(
    program: BorrowedFd<'_>,
    frame: &[u8],
    gso_size: u32,
    repeat: u32,
) -> io::Result<Ran> {
    let mut context = [0u8; CONTEXT_LEN];
    context[GSO_SIZE..GSO_SIZE + 4].copy_from_slice(&gso_size.to_ne_bytes());
    let mut out = vec![0u8; frame.len() + ROOM];
    let mut run = TestRun {
        prog_fd: program.as_raw_fd() as u32,
        data_size_in: frame.len() as u32,
        data_size_out: out.len() as u32,
        data_in: frame.as_ptr() as u64,
        data_out: out.as_mut_ptr() as u64,
        repeat,
        ..TestRun::default()
    };
    if gso_size != 0 {
        run.ctx_size_in = CONTEXT_LEN as u32;
        run.ctx_in = context.as_ptr() as u64;
    }
    // SAFETY: the attribute and all that it points to are as long as it says, and live.
    let done = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            BPF_PROG_TEST_RUN,
            &raw mut run,
            size_of::<TestRun>(),
        )
    };
    if done != 0 {
        return Err(io::Error::last_os_error());
    }
    out.truncate(run.data_size_out as usize);
    Ok(Ran {
        action: run.retval as i32,
        frame: out,
        mean_ns: run.duration,
    })
}
