//! tcx programs of somebody else's, in front of slipgate's: no tool on an older distribution attaches
//! them.

use std::{
    ffi::CString,
    io,
    os::{
        fd::{AsRawFd as _, FromRawFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
};

use crate::netns::NetNs;

/// Numbers of `enum bpf_cmd`, `enum bpf_attach_type` and of flags, `<linux/bpf.h>`.
const BPF_OBJ_GET: libc::c_int = 7;
const BPF_LINK_CREATE: libc::c_int = 28;
const BPF_TCX_INGRESS: u32 = 46;
const BPF_F_BEFORE: u32 = 1 << 3;

/// The part of `union bpf_attr` that `BPF_OBJ_GET` reads.
#[repr(C)]
struct ObjGet {
    pathname: u64,
    bpf_fd: u32,
    file_flags: u32,
}

/// The part of `union bpf_attr` that `BPF_LINK_CREATE` reads for tcx.
#[repr(C)]
struct LinkCreate {
    prog_fd: u32,
    target_ifindex: u32,
    attach_type: u32,
    flags: u32,
    relative: u64,
    expected_revision: u64,
}

/// Attaches a pinned program at TC ingress of a device, before all others. It stays until the link is
/// dropped.
///
/// # Errors
/// There is no such device or program, or the kernel has no tcx.
pub fn attach_in_front(ns: &NetNs, device: &str, program: &Path) -> io::Result<OwnedFd> {
    let ifindex = ns.ifindex(device).unwrap_or(0);
    let path = CString::new(program.as_os_str().as_bytes())?;
    ns.run(|| {
        let program = call(
            BPF_OBJ_GET,
            &ObjGet {
                pathname: path.as_ptr() as u64,
                bpf_fd: 0,
                file_flags: 0,
            },
        )?;
        call(
            BPF_LINK_CREATE,
            &LinkCreate {
                prog_fd: program.as_raw_fd() as u32,
                target_ifindex: ifindex,
                attach_type: BPF_TCX_INGRESS,
                flags: BPF_F_BEFORE,
                relative: 0,
                expected_revision: 0,
            },
        )
    })
}

fn call<T>(command: libc::c_int, attribute: &T) -> io::Result<OwnedFd> {
    // SAFETY: the attribute is as long as it says, and what it points to lives.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            std::ptr::from_ref(attribute),
            size_of::<T>(),
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just gave us this descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}
