//! The `bpf(2)` commands that aya lacks or hides, each as one function over descriptors.
//!
//! The commands on maps work without any capability, on descriptors that were passed to the
//! process.

mod programs;

use std::{
    ffi::CString,
    io,
    mem::{size_of, size_of_val},
    os::{
        fd::{AsFd as _, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use aya_obj::generated::{
    BPF_F_AFTER, BPF_F_BEFORE, bpf_attach_type, bpf_attr, bpf_cmd, bpf_link_info, bpf_map_info,
    bpf_map_type, bpf_prog_info,
};
use slipgate_abi::IfIndex;

pub(crate) use self::programs::{
    EXIT, SCHED_CLS, call_helper, instruction, prog_load, set_register,
};

/// Usual mount point of bpffs.
pub const BPFFS: &str = "/sys/fs/bpf";

fn call(cmd: bpf_cmd, attr: &mut bpf_attr) -> io::Result<i64> {
    // SAFETY: `attr` is a whole, initialised union; what it points to is the caller's to keep.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            cmd as libc::c_long,
            std::ptr::from_mut(attr),
            size_of::<bpf_attr>(),
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(result)
}

fn zeroed() -> bpf_attr {
    // SAFETY: a union of integers; zero is a value of each, and the kernel wants zero beyond.
    unsafe { std::mem::zeroed() }
}

fn owned(fd: i64) -> OwnedFd {
    // SAFETY: the kernel just gave us this descriptor.
    unsafe { OwnedFd::from_raw_fd(fd as RawFd) }
}

fn number(fd: BorrowedFd<'_>) -> u32 {
    fd.as_raw_fd() as u32
}

fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(io::Error::from)
}

/// Opens a pinned object.
pub(crate) fn obj_get(path: &Path) -> io::Result<OwnedFd> {
    let path = c_path(path)?;
    let mut attr = zeroed();
    attr.__bindgen_anon_4.pathname = path.as_ptr() as u64;
    call(bpf_cmd::BPF_OBJ_GET, &mut attr).map(owned)
}

/// Pins an object at a path.
pub(crate) fn obj_pin(fd: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let path = c_path(path)?;
    let mut attr = zeroed();
    attr.__bindgen_anon_4.pathname = path.as_ptr() as u64;
    attr.__bindgen_anon_4.bpf_fd = number(fd);
    call(bpf_cmd::BPF_OBJ_PIN, &mut attr).map(drop)
}

fn info<T>(fd: BorrowedFd<'_>) -> io::Result<T> {
    // SAFETY: only used with the kernel's info structs: integers and arrays of them.
    let mut info: T = unsafe { std::mem::zeroed() };
    let mut attr = zeroed();
    attr.info.bpf_fd = number(fd);
    attr.info.info_len = size_of_val(&info) as u32;
    attr.info.info = std::ptr::from_mut(&mut info) as u64;
    call(bpf_cmd::BPF_OBJ_GET_INFO_BY_FD, &mut attr)?;
    Ok(info)
}

/// Returns type, sizes and id of a map.
pub(crate) fn map_info(fd: BorrowedFd<'_>) -> io::Result<bpf_map_info> {
    info(fd)
}

/// Opens a map by its id, which needs `CAP_SYS_ADMIN`.
#[cfg(test)]
pub(crate) fn map_by_id(id: u32) -> io::Result<OwnedFd> {
    let mut attr = zeroed();
    attr.__bindgen_anon_6.__bindgen_anon_1.map_id = id;
    call(bpf_cmd::BPF_MAP_GET_FD_BY_ID, &mut attr).map(owned)
}

/// Kind of a map: its type and flags, as the kernel reports them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Kind {
    /// Number of the type, `bpf_map_type`.
    pub number: u32,
    /// Flags of the map, `BPF_F_*`.
    pub flags: u32,
}

const BPF_F_NO_PREALLOC: u32 = 1 << 0;
const BPF_F_MMAPABLE: u32 = 1 << 10;

impl Kind {
    /// Array that can be mapped.
    pub const MAPPED_ARRAY: Self = Self::of(bpf_map_type::BPF_MAP_TYPE_ARRAY, BPF_F_MMAPABLE);
    /// Hash whose elements are allocated when the map is made.
    pub const HASH: Self = Self::of(bpf_map_type::BPF_MAP_TYPE_HASH, 0);
    /// Hash that allocates on demand.
    pub const GROWING_HASH: Self = Self::of(bpf_map_type::BPF_MAP_TYPE_HASH, BPF_F_NO_PREALLOC);
    /// Array of programs, for tail calls.
    pub const PROGRAM_ARRAY: Self = Self::of(bpf_map_type::BPF_MAP_TYPE_PROG_ARRAY, 0);
    /// Trie for the longest matching prefix.
    pub const TRIE: Self = Self::of(bpf_map_type::BPF_MAP_TYPE_LPM_TRIE, BPF_F_NO_PREALLOC);

    const fn of(map_type: bpf_map_type, flags: u32) -> Self {
        Self {
            number: map_type as u32,
            flags,
        }
    }
}

/// Shape of a map: the properties that must be equal for the programs to use the map.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape {
    /// Type and flags of the map.
    pub kind: Kind,
    /// Size of a key, bytes.
    pub key: u32,
    /// Size of a value, bytes.
    pub value: u32,
    /// Maximum number of entries (`max_entries`).
    pub entries: u32,
}

impl Shape {
    /// Returns the shape of an open map.
    pub(crate) fn of(map: BorrowedFd<'_>) -> io::Result<Self> {
        let info = map_info(map)?;
        // The kernel reports the open mode as part of the flags.
        let access = (1 << 3) | (1 << 4);
        Ok(Self {
            kind: Kind {
                number: info.type_,
                flags: info.map_flags & !access,
            },
            key: info.key_size,
            value: info.value_size,
            entries: info.max_entries,
        })
    }
}

/// Returns tag and id of a program.
pub(crate) fn prog_info(fd: BorrowedFd<'_>) -> io::Result<bpf_prog_info> {
    info(fd)
}

/// Returns the name of a program; `None` if it is gone or the process may not ask for it, which
/// needs `CAP_SYS_ADMIN`.
pub(crate) fn program_name(id: u32) -> Option<String> {
    let mut attr = zeroed();
    attr.__bindgen_anon_6.__bindgen_anon_1.prog_id = id;
    let program = call(bpf_cmd::BPF_PROG_GET_FD_BY_ID, &mut attr)
        .map(owned)
        .ok()?;
    let info = prog_info(program.as_fd()).ok()?;
    let name = info.name.iter().take_while(|byte| **byte != 0);
    Some(name.map(|byte| *byte as u8 as char).collect())
}

/// Returns program id and target of a link.
pub(crate) fn link_info(fd: BorrowedFd<'_>) -> io::Result<bpf_link_info> {
    info(fd)
}

/// Position in a chain of programs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ChainPosition {
    First,
    Last,
}

/// Attaches a program to an interface.
pub(crate) fn link_create_tcx(
    program: BorrowedFd<'_>,
    ifindex: IfIndex,
    place: ChainPosition,
) -> io::Result<OwnedFd> {
    let mut attr = zeroed();
    attr.link_create.__bindgen_anon_1.prog_fd = number(program);
    attr.link_create.__bindgen_anon_2.target_ifindex = ifindex.get();
    attr.link_create.attach_type = bpf_attach_type::BPF_TCX_INGRESS as u32;
    // Relative to no program: an end of the chain.
    attr.link_create.flags = match place {
        ChainPosition::First => BPF_F_BEFORE,
        ChainPosition::Last => BPF_F_AFTER,
    };
    call(bpf_cmd::BPF_LINK_CREATE, &mut attr).map(owned)
}

/// XDP on skbs, and that of the driver (<linux/if_link.h>).
pub(crate) const XDP_FLAGS_SKB_MODE: u32 = 1 << 1;
pub(crate) const XDP_FLAGS_DRV_MODE: u32 = 1 << 2;

/// Attaches an XDP program to an interface. `flags`: `XDP_FLAGS_*`.
pub(crate) fn link_create_xdp(
    program: BorrowedFd<'_>,
    ifindex: IfIndex,
    flags: u32,
) -> io::Result<OwnedFd> {
    let mut attr = zeroed();
    attr.link_create.__bindgen_anon_1.prog_fd = number(program);
    attr.link_create.__bindgen_anon_2.target_ifindex = ifindex.get();
    attr.link_create.attach_type = bpf_attach_type::BPF_XDP as u32;
    attr.link_create.flags = flags;
    call(bpf_cmd::BPF_LINK_CREATE, &mut attr).map(owned)
}

/// Replaces the program of a link atomically: every packet meets exactly one of them.
pub(crate) fn link_update(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    let mut attr = zeroed();
    attr.link_update.link_fd = number(link);
    attr.link_update.__bindgen_anon_1.new_prog_fd = number(program);
    call(bpf_cmd::BPF_LINK_UPDATE, &mut attr).map(drop)
}

/// Detaches a link from its target at once, even if other processes hold it.
pub(crate) fn link_detach(link: BorrowedFd<'_>) -> io::Result<()> {
    let mut attr = zeroed();
    attr.link_detach.link_fd = number(link);
    call(bpf_cmd::BPF_LINK_DETACH, &mut attr).map(drop)
}

/// Returns the ids of the programs at an interface's tcx ingress, in the order in which they run;
/// at most 64, which is the kernel's limit.
pub(crate) fn tcx_programs(ifindex: IfIndex) -> io::Result<Vec<u32>> {
    let mut ids = [0u32; 64];
    let mut attr = zeroed();
    attr.query.__bindgen_anon_1.target_ifindex = ifindex.get();
    attr.query.attach_type = bpf_attach_type::BPF_TCX_INGRESS as u32;
    attr.query.prog_ids = ids.as_mut_ptr() as u64;
    attr.query.__bindgen_anon_2.count = ids.len() as u32;
    match call(bpf_cmd::BPF_PROG_QUERY, &mut attr) {
        // No program was ever attached there.
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => return Ok(Vec::new()),
        other => other?,
    };
    // SAFETY: the union's `query` was written above; the kernel updates its count.
    let count = unsafe { attr.query.__bindgen_anon_2.count } as usize;
    Ok(ids[..count.min(ids.len())].to_vec())
}

/// Writes an object's name, cut to the field.
fn fill_name(field: &mut [libc::c_char], name: &str) {
    // The last byte stays zero.
    let room = field.len().saturating_sub(1);
    for (to, from) in field[..room].iter_mut().zip(name.bytes()) {
        *to = from as _;
    }
}

/// Makes a map that is not pinned, without BTF.
pub(crate) fn map_create(name: &str, shape: Shape) -> io::Result<OwnedFd> {
    let mut attr = zeroed();
    attr.__bindgen_anon_1.map_type = shape.kind.number;
    attr.__bindgen_anon_1.key_size = shape.key;
    attr.__bindgen_anon_1.value_size = shape.value;
    attr.__bindgen_anon_1.max_entries = shape.entries;
    attr.__bindgen_anon_1.map_flags = shape.kind.flags;
    // SAFETY: the struct written above; its name is plain bytes.
    fill_name(unsafe { &mut attr.__bindgen_anon_1.map_name }, name);
    call(bpf_cmd::BPF_MAP_CREATE, &mut attr).map(owned)
}

/// Looks a key up. Returns true and fills `value` if the key exists.
///
/// # Safety
/// `key` and `value` point to as many bytes as the map has key and value size.
pub(crate) unsafe fn lookup(
    map: BorrowedFd<'_>,
    key: *const u8,
    value: *mut u8,
) -> io::Result<bool> {
    let mut attr = zeroed();
    attr.__bindgen_anon_2.map_fd = number(map);
    attr.__bindgen_anon_2.key = key as u64;
    attr.__bindgen_anon_2.__bindgen_anon_1.value = value as u64;
    found(call(bpf_cmd::BPF_MAP_LOOKUP_ELEM, &mut attr))
}

/// Inserts or replaces. `flags`: `BPF_ANY`, `BPF_NOEXIST`, `BPF_EXIST`.
///
/// # Safety
/// As for [`lookup`].
pub(crate) unsafe fn update(
    map: BorrowedFd<'_>,
    key: *const u8,
    value: *const u8,
    flags: u64,
) -> io::Result<()> {
    let mut attr = zeroed();
    attr.__bindgen_anon_2.map_fd = number(map);
    attr.__bindgen_anon_2.key = key as u64;
    attr.__bindgen_anon_2.__bindgen_anon_1.value = value as u64;
    attr.__bindgen_anon_2.flags = flags;
    call(bpf_cmd::BPF_MAP_UPDATE_ELEM, &mut attr).map(drop)
}

/// Deletes a key. Returns whether it existed.
///
/// # Safety
/// As for [`lookup`].
pub(crate) unsafe fn delete(map: BorrowedFd<'_>, key: *const u8) -> io::Result<bool> {
    let mut attr = zeroed();
    attr.__bindgen_anon_2.map_fd = number(map);
    attr.__bindgen_anon_2.key = key as u64;
    found(call(bpf_cmd::BPF_MAP_DELETE_ELEM, &mut attr))
}

/// Result of a batch look-up.
pub(crate) struct Batch {
    /// Number of entries filled.
    pub(crate) count: u32,
    /// Whether there are more entries.
    pub(crate) more: bool,
}

/// Reads up to `count` entries. `input` and `output` hold the kernel's cursor; `input` is null for
/// the first batch.
///
/// # Safety
/// `keys` and `values` have room for `count` of the map's keys and values; `input` is null or what
/// the last call left in `output`, each as large as a key and at least four bytes.
pub(crate) unsafe fn lookup_batch(
    map: BorrowedFd<'_>,
    input: *const u8,
    output: *mut u8,
    keys: *mut u8,
    values: *mut u8,
    count: u32,
) -> io::Result<Batch> {
    let mut attr = zeroed();
    attr.batch.map_fd = number(map);
    attr.batch.in_batch = input as u64;
    attr.batch.out_batch = output as u64;
    attr.batch.keys = keys as u64;
    attr.batch.values = values as u64;
    attr.batch.count = count;
    let result = call(bpf_cmd::BPF_MAP_LOOKUP_BATCH, &mut attr);
    // SAFETY: the union's `batch` was written above; the kernel updates its count.
    let count = unsafe { attr.batch.count };
    Ok(Batch {
        count,
        more: found(result)?,
    })
}

/// Deletes `count` keys in order, up to the first that is absent or that the kernel refuses to
/// delete. Returns how many were deleted, and the error of the key behind them; `None` if the kernel
/// lacks the command for this map, and nothing was done.
///
/// # Safety
/// `keys` points to `count` of the map's keys.
pub(crate) unsafe fn delete_batch(
    map: BorrowedFd<'_>,
    keys: *const u8,
    count: u32,
) -> Option<(u32, io::Result<()>)> {
    let mut attr = zeroed();
    attr.batch.map_fd = number(map);
    attr.batch.keys = keys as u64;
    attr.batch.count = count;
    let result = call(bpf_cmd::BPF_MAP_DELETE_BATCH, &mut attr).map(drop);
    // SAFETY: the union's `batch` was written above; the kernel updates its count.
    let deleted = unsafe { attr.batch.count };
    // A kernel that has the command sets the count before it looks at the first key.
    let is_lacking = result.is_err() && deleted >= count;
    (!is_lacking).then_some((deleted, result))
}

fn found(result: io::Result<i64>) -> io::Result<bool> {
    match result {
        Ok(_) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(false),
        Err(error) => Err(error),
    }
}
