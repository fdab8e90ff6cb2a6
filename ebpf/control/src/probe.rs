//! Capabilities of this kernel and this process, determined by trying.

use std::{
    ffi::CString,
    fs, io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use aya_obj::generated::{bpf_attach_type, bpf_func_id};
use slipgate_abi::IfIndex;

use crate::{
    Error, Result,
    attach::Hook,
    bpf::{self, EXIT, SCHED_CLS, call_helper, instruction, set_register},
    layout::{MapName, Sizes},
    pacing,
    paths::BPFFS,
};

/// Name of the check of the file system in which maps are pinned.
pub const FILE_SYSTEM: &str = "bpffs";

/// Result of one check.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Check {
    /// Name of the feature.
    pub name: &'static str,
    /// Whether the feature is available.
    pub ok: bool,
    /// Whether slipgate works without it.
    pub optional: bool,
    /// Description of the result.
    pub found: String,
    /// Purpose of the feature, and how to get it; `None` if it is available.
    pub remedy: Option<&'static str>,
}

/// Runs all checks. They change nothing that outlives the call.
pub fn checks() -> Vec<Check> {
    let tc = |helper: bpf_func_id| calls_helper(helper).map(drop);
    vec![
        kernel(),
        check(
            "BPF programs",
            false,
            "run as root, or with CAP_BPF, CAP_NET_ADMIN and CAP_PERFMON",
            pass_program().map(drop),
        ),
        check(
            "mappable arrays",
            false,
            "needs Linux 5.5 and CAP_BPF",
            mappable_array().map(drop),
        ),
        check(
            "BTF",
            false,
            "build the kernel with CONFIG_DEBUG_INFO_BTF, so that bpftool prints names",
            fs::metadata("/sys/kernel/btf/vmlinux").map(drop),
        ),
        check(
            "bpf_redirect_neigh",
            false,
            "needs Linux 5.10",
            tc(bpf_func_id::BPF_FUNC_redirect_neigh),
        ),
        check(
            "bpf_check_mtu",
            false,
            "needs Linux 5.12",
            tc(bpf_func_id::BPF_FUNC_check_mtu),
        ),
        check(
            "shaped rates",
            true,
            "needs sch_htb and veth: without them rates of bytes are policed, which TCP serves badly",
            pacing::try_shaping().map_err(|e| io::Error::other(e.to_string())),
        ),
        check("tcx", true, "needs Linux 6.6; clsact serves instead", tcx()),
        check(
            FILE_SYSTEM,
            false,
            "mount it: mount -t bpf bpf /sys/fs/bpf (slipgate does so when it may)",
            is_bpffs(Path::new(BPFFS)).and_then(|yes| {
                if yes {
                    Ok(())
                } else {
                    Err(io::Error::other("not mounted"))
                }
            }),
        ),
        check(
            "TAP devices",
            false,
            "load the module: modprobe tun",
            fs::File::options()
                .read(true)
                .write(true)
                .open("/dev/net/tun")
                .map(drop),
        ),
    ]
}

/// Returns tcx if the kernel has it, otherwise clsact.
pub fn best_hook() -> Hook {
    if tcx().is_ok() {
        Hook::Tcx
    } else {
        Hook::Clsact
    }
}

/// Makes sure that pins can be made below `pin_dir`: mounts bpffs in its usual place if it is
/// missing there.
pub(crate) fn ensure_bpffs(pin_dir: &Path) -> Result<()> {
    let there = pin_dir
        .ancestors()
        .find(|dir| dir.exists())
        .unwrap_or(Path::new("/"));
    let look = |dir: &Path| {
        is_bpffs(dir).map_err(Error::os(format!(
            "look at the file system of {}",
            dir.display()
        )))
    };
    if look(there)? {
        return Ok(());
    }
    if !pin_dir.starts_with(BPFFS) {
        return Err(Error::NotBpffs {
            dir: pin_dir.to_owned(),
        });
    }
    let target = CString::new(BPFFS).unwrap_or_default();
    // SAFETY: terminated strings, no data.
    let mounted = unsafe {
        libc::mount(
            c"bpf".as_ptr(),
            target.as_ptr(),
            c"bpf".as_ptr(),
            0,
            std::ptr::null(),
        )
    };
    if mounted != 0 {
        return Err(Error::os(format!("mount bpffs on {BPFFS}"))(
            io::Error::last_os_error(),
        ));
    }
    Ok(())
}

fn is_bpffs(dir: &Path) -> io::Result<bool> {
    const BPF_FS_MAGIC: u64 = 0xcafe_4a11;
    let path = CString::new(dir.as_os_str().as_bytes())?;
    // SAFETY: a struct of integers.
    let mut answer: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: a terminated path and room for the answer.
    if unsafe { libc::statfs(path.as_ptr(), &raw mut answer) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(answer.f_type as u64 == BPF_FS_MAGIC)
}

/// Makes the result of a check from that of a trial.
fn check(name: &'static str, optional: bool, remedy: &'static str, tried: io::Result<()>) -> Check {
    let ok = tried.is_ok();
    Check {
        name,
        ok,
        optional,
        found: tried.map_or_else(|error| error.to_string(), |()| "there".into()),
        remedy: (!ok).then_some(remedy),
    }
}

fn kernel() -> Check {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let release = release.trim();
    let ok = version(release).is_some_and(|version| version >= (6, 1));
    Check {
        name: "Linux 6.1 or newer",
        ok,
        optional: false,
        found: release.into(),
        remedy: (!ok).then_some("run a kernel of at least 6.1"),
    }
}

/// Returns major and minor version of a release such as `6.18.44-cloud`.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// Loads a program that passes every packet.
pub(crate) fn pass_program() -> io::Result<OwnedFd> {
    bpf::prog_load("", SCHED_CLS, 0, &[set_register(0, -1), EXIT])
}

/// Loads a TC program that calls a helper. All arguments are zero: besides the context they are
/// numbers, or pointers that may be null.
fn calls_helper(helper: bpf_func_id) -> io::Result<OwnedFd> {
    let call = call_helper(helper as i32);
    let zero = |register| set_register(register, 0);
    match helper {
        bpf_func_id::BPF_FUNC_check_mtu => {
            // r3 points to a u32 on the stack: r3 = r10 - 4, and that u32 is zero.
            let store = 0x62 | 10 << 8 | u64::from(-4i16 as u16) << 16;
            let copy = 0xbf | 3 << 8 | 10 << 12;
            let less_four = instruction(0x07, 3, -4);
            bpf::prog_load(
                "",
                SCHED_CLS,
                0,
                &[
                    store,
                    copy,
                    less_four,
                    zero(2),
                    zero(4),
                    zero(5),
                    call,
                    EXIT,
                ],
            )
        }
        _ => bpf::prog_load(
            "",
            SCHED_CLS,
            0,
            &[zero(1), zero(2), zero(3), zero(4), call, EXIT],
        ),
    }
}

fn mappable_array() -> io::Result<OwnedFd> {
    bpf::map_create("probe", MapName::Meta.shape(Sizes::of_slots(0)))
}

/// Requests a link on an interface that does not exist. A kernel that has tcx reports the missing
/// interface; one without refuses the attach type.
fn tcx() -> io::Result<()> {
    const NO_INTERFACE: IfIndex = IfIndex::new(i32::MAX as u32);
    let program = pass_program()?;
    match bpf::link_create_tcx(program.as_fd(), NO_INTERFACE, bpf::ChainPosition::First) {
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(()),
        Err(error) => Err(error),
        Ok(_) => Err(io::Error::other(format!(
            "attach type {} went to no interface",
            bpf_attach_type::BPF_TCX_INGRESS as u32
        ))),
    }
}

#[cfg(test)]
#[path = "probe_test.rs"]
mod tests;
