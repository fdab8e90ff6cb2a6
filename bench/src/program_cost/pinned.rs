//! Pinned programs and maps, accessed by `bpf(2)` directly: the objects belong to another process
//! and are only inspected.

use std::{
    ffi::CString,
    io,
    marker::PhantomData,
    mem::size_of,
    os::{
        fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use anyhow::{Context, Result, ensure};

/// Commands of bpf(2) (include/uapi/linux/bpf.h).
const BPF_MAP_LOOKUP_ELEM: libc::c_long = 1;
const BPF_MAP_UPDATE_ELEM: libc::c_long = 2;
const BPF_MAP_DELETE_ELEM: libc::c_long = 3;
const BPF_OBJ_GET: libc::c_long = 7;
const BPF_PROG_TEST_RUN: libc::c_long = 10;
const BPF_OBJ_GET_INFO_BY_FD: libc::c_long = 15;

/// Hash of a program's instructions, computed by the kernel.
pub(crate) type Tag = [u8; 8];

/// A map of `K` to `V`.
pub(super) struct PinnedMap<K, V> {
    fd: OwnedFd,
    elements: u32,
    of: PhantomData<(K, V)>,
}

/// A part of `union bpf_attr`. The rest of the union is zero.
trait Attr {}

#[repr(C)]
struct ObjGet {
    pathname: u64,
    bpf_fd: u32,
    file_flags: u32,
}

#[repr(C)]
struct MapElem {
    map_fd: u32,
    pad: u32,
    key: u64,
    value: u64,
    flags: u64,
}

#[repr(C)]
struct InfoByFd {
    bpf_fd: u32,
    info_len: u32,
    info: u64,
}

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

impl Attr for ObjGet {}
impl Attr for MapElem {}
impl Attr for InfoByFd {}
impl Attr for TestRun {}

/// # Safety
/// What the attribute points to must be as long as the command takes it to be.
unsafe fn bpf<A: Attr>(command: libc::c_long, attr: &mut A) -> io::Result<i64> {
    // SAFETY: the attribute is writable for its size, and the caller keeps the rest.
    let done = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            std::ptr::from_mut(attr),
            size_of::<A>(),
        )
    };
    match done {
        -1 => Err(io::Error::last_os_error()),
        done => Ok(done),
    }
}

/// Opens a pinned object.
pub(super) fn open(path: &Path) -> Result<OwnedFd> {
    let text = CString::new(path.as_os_str().as_bytes())?;
    let mut attr = ObjGet {
        pathname: text.as_ptr() as u64,
        bpf_fd: 0,
        file_flags: 0,
    };
    // SAFETY: the path ends with a zero.
    let fd = unsafe { bpf(BPF_OBJ_GET, &mut attr) };
    let fd = fd.with_context(|| format!("open the pinned {}", path.display()))?;
    // SAFETY: a fresh descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// Returns the tag of a program.
pub(super) fn tag(program: BorrowedFd<'_>) -> Result<Tag> {
    // The beginning of `struct bpf_prog_info`: type and id, then the tag.
    let mut info = [0_u8; 16];
    let mut attr = InfoByFd {
        bpf_fd: program.as_raw_fd() as u32,
        info_len: info.len() as u32,
        info: info.as_mut_ptr() as u64,
    };
    // SAFETY: the kernel writes no more than the length given.
    unsafe { bpf(BPF_OBJ_GET_INFO_BY_FD, &mut attr) }.context("ask for a program's tag")?;
    let mut tag = Tag::default();
    tag.copy_from_slice(&info[8..]);
    Ok(tag)
}

/// Returns the mean time of a run of a program on `frame`, each on the result of the previous run,
/// ns.
pub(super) fn test_run(program: BorrowedFd<'_>, frame: &[u8], repeat: u32) -> Result<f64> {
    let mut run = TestRun {
        prog_fd: program.as_raw_fd() as u32,
        data_size_in: frame.len() as u32,
        data_in: frame.as_ptr() as u64,
        repeat,
        ..TestRun::default()
    };
    // SAFETY: the frame is readable for its length; no output buffer is given.
    unsafe { bpf(BPF_PROG_TEST_RUN, &mut run) }?;
    Ok(f64::from(run.duration))
}

impl<K: Copy, V: Copy> PinnedMap<K, V> {
    /// Opens a pinned map.
    ///
    /// # Errors
    /// It cannot be opened, or its keys or values have other sizes.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let fd = open(path)?;
        // The beginning of `struct bpf_map_info`: type, id, sizes of key and value, elements.
        let mut info = [0_u32; 5];
        let mut attr = InfoByFd {
            bpf_fd: fd.as_raw_fd() as u32,
            info_len: size_of_val(&info) as u32,
            info: info.as_mut_ptr() as u64,
        };
        // SAFETY: the kernel writes no more than the length given.
        unsafe { bpf(BPF_OBJ_GET_INFO_BY_FD, &mut attr) }.context("ask for a map's sizes")?;
        let [_, _, key, value, elements] = info;
        let ours = (size_of::<K>() as u32, size_of::<V>() as u32);
        ensure!(
            (key, value) == ours,
            "{} has keys and values of {key} and {value} bytes, where {ours:?} were expected",
            path.display()
        );
        Ok(Self {
            fd,
            elements,
            of: PhantomData,
        })
    }

    /// Returns the maximum number of elements.
    pub(super) fn elements(&self) -> u32 {
        self.elements
    }

    fn element(&self, key: &K, value: u64) -> MapElem {
        MapElem {
            map_fd: self.fd.as_raw_fd() as u32,
            pad: 0,
            key: std::ptr::from_ref(key) as u64,
            value,
            flags: 0,
        }
    }

    /// Sets the value of an element.
    pub(super) fn set(&self, key: &K, value: &V) -> Result<()> {
        let mut attr = self.element(key, std::ptr::from_ref(value) as u64);
        // SAFETY: both are as long as the map's, whose layout is the ABI crate's.
        unsafe { bpf(BPF_MAP_UPDATE_ELEM, &mut attr) }.context("set an element of a map")?;
        Ok(())
    }

    /// Removes the element of a key.
    pub(super) fn remove(&self, key: &K) -> Result<()> {
        let mut attr = self.element(key, 0);
        // SAFETY: the key is as long as the map's.
        unsafe { bpf(BPF_MAP_DELETE_ELEM, &mut attr) }.context("remove an element of a map")?;
        Ok(())
    }

    /// Reads an element into `value`, which must hold a valid value before.
    pub(super) fn read(&self, key: &K, value: &mut V) -> Result<()> {
        let mut attr = self.element(key, std::ptr::from_mut(value) as u64);
        // SAFETY: as above; what programs write there is a value of its kind.
        unsafe { bpf(BPF_MAP_LOOKUP_ELEM, &mut attr) }.context("read an element of a map")?;
        Ok(())
    }
}
