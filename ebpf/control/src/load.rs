//! Loads the programs and makes the maps, or joins those that another process has pinned.
//!
//! # Theory of operation
//!
//! Everything by which established flows continue without a process is pinned: the maps by their
//! names, the programs by theirs, each attachment as `<program>-<ifindex>`. A process that opens
//! the directory holds a lock on `lock` in the run directory meanwhile.
//!
//! Existing maps are used if their version and shape are those of this build, copied if they are of
//! a former version that can be read ([`former`]), and refused otherwise. Existing programs are used
//! if they are of this very build. Otherwise the own programs are loaded and replace those of each
//! pinned link by an atomic update, so that no packet meets neither or both; then they are pinned in
//! the place of the old ones. A file beside the locks records the build of the pinned programs. It is
//! absent while they are replaced: a start that dies in between leaves a mix of two builds of one ABI,
//! which the next start makes uniform. The logging build belongs to the process that reads its log, so
//! another process never uses it.
//!
//! Programs for IPv6 are in a program array, which is pinned in their place ([`programs6`]). The
//! programs whose place in a chain matters have twins, which are small ([`twins`]).
//!
//! aya makes the maps (with the object's BTF, so that bpftool prints names) and loads the programs.
//! Links are made by our own calls: aya would detach its attachments when dropped.

mod at_once;
mod attached;
mod build;
mod former;
#[cfg(test)]
#[path = "load/maps_only_test.rs"]
mod maps_only;
mod programs6;
mod twins;

use std::{
    fs,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::atomic::{
        AtomicBool,
        Ordering::{AcqRel, Acquire, Relaxed, Release},
    },
    time::{Duration, Instant},
};

use aya::{Ebpf, EbpfLoader};
use slipgate_abi::{ABI_VERSION, early_fragment::EARLY_CLAIMS, maps as abi_maps, skb::SKB_LAYOUT};

use self::{
    build::{clear_build, is_this_build, open_programs, record_build},
    twins::Twins,
};
use crate::{
    Error, Paths, Result,
    attach::{Program, program_id},
    bpf,
    bpf_log::BpfLog,
    btf,
    layout::{MapName, Sizes},
    lock::{FileLock, PATIENCE, WHILE_SERVING},
    maps::{SharedMaps, check_pinned, open_pins},
    object, paths,
    pins::{check_alone, remove_pins},
    probe,
};

/// Loaded programs, by their kinds.
type Loaded = Vec<(Program, OwnedFd)>;

/// Options of [`Datapath::open`]: paths, sizes and the build of the programs.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Directories of pins and locks.
    pub paths: Paths,
    /// Sizes of the maps; the slots are rounded up to whole chunks. Existing maps keep theirs.
    pub sizes: Sizes,
    /// Whether to load the logging build.
    pub bpf_log: bool,
    /// Whether a VM of this process has IPv6, or may get it.
    pub ipv6: bool,
}

/// The loaded programs and the shared maps.
#[derive(Debug)]
pub struct Datapath {
    pub(crate) paths: Paths,
    pub(crate) maps: SharedMaps,
    programs: Loaded,
    twins: Twins,
    log: Option<BpfLog>,
    /// Whether the maps existed before.
    joined: bool,
    /// Whether guests are served: then the process waits for the lock for a short time only.
    serves: AtomicBool,
}

impl Datapath {
    /// Makes or joins the pinned state in the calling thread's network namespace.
    ///
    /// # Errors
    /// There is no bpffs, another set of pins belongs to the namespace, the lock is not obtained,
    /// the pinned maps have another version or shape, or the kernel refuses a map or a program.
    pub fn open(options: &LoadOptions) -> Result<Self> {
        // Fails before anything of a predecessor is changed.
        let object = object::bytes(options.bpf_log)?;
        let paths = options.paths.clone();
        probe::ensure_bpffs(&paths.pin_dir)?;
        check_alone(&paths)?;
        let _lock = create_and_lock(&paths)?;

        if paths.are_stale()? {
            tracing::warn!(
                pin_dir = %paths.pin_dir.display(),
                "removing pins of a network namespace that is gone"
            );
            remove_pins(&paths)?;
        }
        former::convert(&paths, former::FORMER.as_ref())?;
        let joined = is_complete(&paths)?;
        paths.keep_cookie()?;
        let sizes = if joined {
            check_pinned(&open_pins(&paths.pin_dir)?, &paths.pin_dir)?
        } else {
            possible(options.sizes)
        };
        // Those of another build are replaced with the others.
        let has_ipv6 = options.ipv6 || programs6::are_in_use(&paths);
        let (programs, twins, log) = if joined && !options.bpf_log && is_this_build(&paths) {
            if has_ipv6 && !programs6::are_there(&paths) {
                let mut ebpf = load_object(&paths, object, sizes)?;
                programs6::fill(&at_once::load(&mut ebpf, programs6::names())?, &paths)?;
            }
            (open_programs(&paths)?, Twins::open(&paths)?, None)
        } else {
            // Until all are replaced, the pinned programs may be of two builds.
            clear_build(&paths)?;
            let mut ebpf = load_object(&paths, object, sizes)?;
            make_missing_maps(&paths, sizes)?;
            let log = options.bpf_log.then(|| BpfLog::of(&mut ebpf)).transpose()?;
            let programs = load_programs(&mut ebpf, &paths, has_ipv6)?;
            let twins = Twins::make(&programs)?;
            (programs, twins, log)
        };
        let maps = SharedMaps::assemble(open_pins(&paths.pin_dir)?)?;
        initialise(&maps)?;
        let datapath = Self {
            paths,
            maps,
            programs,
            twins,
            log,
            joined,
            serves: AtomicBool::new(false),
        };
        datapath.replace_attached()?;
        datapath.pin_programs()?;
        if !options.bpf_log {
            record_build(&datapath.paths)?;
        }
        Ok(datapath)
    }

    /// Returns the shared maps.
    pub fn maps(&self) -> &SharedMaps {
        &self.maps
    }

    /// Returns the directories of pins and locks.
    pub fn paths(&self) -> &Paths {
        &self.paths
    }

    /// Whether the maps existed before.
    pub fn joined(&self) -> bool {
        self.joined
    }

    /// Takes the log of the programs; `None` unless they are of the logging build.
    pub fn take_log(&mut self) -> Option<BpfLog> {
        self.log.take()
    }

    /// Returns the descriptor of a loaded program.
    ///
    /// # Errors
    /// The BPF object does not have the program.
    pub fn program(&self, program: Program) -> Result<BorrowedFd<'_>> {
        find(&self.programs, program).ok_or_else(|| no_program(program.name()))
    }

    /// Returns the descriptor of a program's twin, if it has one.
    pub(crate) fn twin(&self, program: Program) -> Option<BorrowedFd<'_>> {
        find(&self.twins.programs, program)
    }

    /// Sets whether guests are served. While they are, operations that need the lock soon fail
    /// ([`Error::is_locked`]) and are to be repeated; a start and an orderly stop wait for longer.
    pub fn set_serves(&self, serves: bool) {
        self.serves.store(serves, Relaxed);
    }

    /// Returns the time for which this process may wait for a lock now.
    pub fn patience(&self) -> Duration {
        match self.serves.load(Relaxed) {
            true => WHILE_SERVING,
            false => PATIENCE,
        }
    }

    pub(crate) fn lock(&self) -> Result<FileLock> {
        lock(&self.paths, self.patience())
    }

    fn pin_programs(&self) -> Result<()> {
        let programs = self.programs.iter().map(|(of, fd)| (of.name(), fd));
        let twins = self.twins.programs.iter();
        let twins = twins.filter_map(|(of, fd)| Some((of.twin_name()?, fd)));
        for (name, fd) in programs.chain(twins) {
            let path = self.paths.pin(name);
            let what = || format!("pin the program {name} in {}", path.display());
            if let Ok(pinned) = bpf::obj_get(&path) {
                if program_id(pinned.as_fd())? == program_id(fd.as_fd())? {
                    continue;
                }
                paths::remove_if_there(&path, |p| fs::remove_file(p))?;
            }
            bpf::obj_pin(fd.as_fd(), &path).map_err(Error::os(what()))?;
        }
        self.twins.pin_array(&self.paths)
    }

    /// Removes every pin. The caller holds the lock and knows that no owner lives.
    pub(crate) fn unpin_all(&self) -> Result<()> {
        remove_pins(&self.paths)?;
        self.paths.remove()
    }
}

fn find(loaded: &Loaded, program: Program) -> Option<BorrowedFd<'_>> {
    let mut loaded = loaded.iter();
    let found = loaded.find(|(of, _)| *of == program);
    found.map(|(_, fd)| fd.as_fd())
}

fn lock(paths: &Paths, patience: Duration) -> Result<FileLock> {
    FileLock::wait(&paths.run_dir.join("lock"), patience)
}

/// Makes the directories and takes their lock, even while a last owner removes them, or a start in another
/// namespace that finds the second one empty ([`crate::pins`]).
fn create_and_lock(paths: &Paths) -> Result<FileLock> {
    let begun = Instant::now();
    loop {
        match paths.create().and_then(|()| lock(paths, PATIENCE)) {
            Ok(lock) => {
                // The last owner may have removed the pins' directory before the lock file was made
                // again.
                paths.create()?;
                return Ok(lock);
            }
            Err(error) if error.errno() == Some(libc::ENOENT) && begun.elapsed() < PATIENCE => {}
            Err(error) => return Err(error),
        }
    }
}

/// Whether all maps are pinned. Removes the incomplete maps of a start that died.
fn is_complete(paths: &Paths) -> Result<bool> {
    let missing = |map: &MapName| !paths.pin(map.name()).exists();
    let Some(first_missing) = MapName::ALL.into_iter().find(|map| missing(map)) else {
        return Ok(true);
    };
    let present: Vec<_> = MapName::ALL
        .into_iter()
        .filter(|map| !missing(map))
        .collect();
    if present.is_empty() {
        return Ok(false);
    }
    // The version is written last, so maps without one were never in use.
    let meta = paths.pin(MapName::Meta.name());
    let in_use = bpf::obj_get(&meta)
        .is_ok_and(|meta| crate::maps::abi_version_of(meta.as_fd()).is_some_and(|v| v != 0));
    if in_use {
        return Err(Error::Incomplete {
            pin_dir: paths.pin_dir.clone(),
            missing: first_missing.name(),
        });
    }
    for name in present.into_iter().map(MapName::name).chain([EARLY_CLAIMS]) {
        paths::remove_if_there(&paths.pin(name), |p| fs::remove_file(p))?;
    }
    Ok(false)
}

/// Returns the sizes within the limits, the slots rounded up to whole chunks.
fn possible(sizes: Sizes) -> Sizes {
    let chunk = abi_maps::SLOTS_PER_CHUNK;
    Sizes {
        slots: sizes.slots.div_ceil(chunk).clamp(1, abi_maps::MAX_CHUNKS) * chunk,
        vms: sizes.vms.clamp(1, abi_maps::MOST_VMS),
        rules: sizes.rules.clamp(1, abi_maps::MOST_RULES),
    }
}

fn load_object(paths: &Paths, object: &[u8], sizes: Sizes) -> Result<Ebpf> {
    let skb = btf::skb_layout()?;
    let mut loader = EbpfLoader::new();
    loader.override_global(SKB_LAYOUT, &skb, true);
    for map in MapName::ALL {
        loader.map_pin_path(map.name(), paths.pin(map.name()));
        loader.map_max_entries(map.name(), map.shape(sizes).entries);
    }
    programs6::pin(&mut loader, paths);
    // Those for IPv6 may be loaded later, and share it. No other process gets its descriptor.
    loader.map_pin_path(EARLY_CLAIMS, paths.pin(EARLY_CLAIMS));
    loader
        .load(object)
        .map_err(|error| refused("the BPF object", &error))
}

/// Makes the maps that no program uses and that are therefore not in the object.
fn make_missing_maps(paths: &Paths, sizes: Sizes) -> Result<()> {
    for map in MapName::ALL {
        let path = paths.pin(map.name());
        if path.exists() {
            continue;
        }
        let shape = map.shape(sizes);
        let what = format!("make the map {}", map.name());
        let fd = bpf::map_create(map.name(), shape).map_err(Error::os(what.clone()))?;
        bpf::obj_pin(fd.as_fd(), &path).map_err(Error::os(what))?;
    }
    Ok(())
}

/// Initializes META. The version is written last: it marks the maps as in use.
fn initialise(maps: &SharedMaps) -> Result<()> {
    let first = maps
        .next_vm_id()
        .compare_exchange(0, 1, AcqRel, Acquire)
        .is_ok();
    if first || maps.meta_abi_version().load(Acquire) == 0 {
        maps.meta_slots().store(maps.slots(), Release);
        maps.meta_instance().store(random_word()?, Release);
        maps.meta_abi_version().store(ABI_VERSION, Release);
    }
    Ok(())
}

/// Returns a random number that cannot be guessed.
pub(crate) fn random_word() -> Result<u32> {
    let mut word = [0; size_of::<u32>()];
    // SAFETY: room for as many bytes.
    match unsafe { libc::getrandom(word.as_mut_ptr().cast(), word.len(), 0) } {
        4 => Ok(u32::from_ne_bytes(word)),
        _ => Err(Error::os("draw a random number")(
            std::io::Error::last_os_error(),
        )),
    }
}

/// Loads the programs, and puts those for IPv6 into their array.
fn load_programs(ebpf: &mut Ebpf, paths: &Paths, has_ipv6: bool) -> Result<Loaded> {
    let names = Program::ALL.into_iter().map(Program::name);
    let names6 = programs6::names().filter(|_| has_ipv6);
    let mut loaded = at_once::load(ebpf, names.chain(names6))?;
    if has_ipv6 {
        programs6::fill(&loaded, paths)?;
    }
    let of = |program: Program| {
        let fd = loaded.remove(program.name());
        Ok((program, fd.ok_or_else(|| no_program(program.name()))?))
    };
    Program::ALL.into_iter().map(of).collect()
}

fn no_program(name: &str) -> Error {
    Error::Load {
        what: format!("the program {name}"),
        reason: "the BPF object has none: build it anew with `cargo xtask build --bpf-only`".into(),
    }
}

/// Returns the error with its causes and the end of the verifier's log.
fn refused(what: &str, error: &dyn std::error::Error) -> Error {
    let mut reason = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let text = inner.to_string();
        if !reason.contains(&text) {
            reason = format!("{reason}: {text}");
        }
        cause = inner.source();
    }
    const LINES: usize = 40;
    let lines: Vec<_> = reason.lines().collect();
    if lines.len() > LINES {
        let end = lines[lines.len() - LINES..].join("\n");
        reason = format!("{} […]\n{end}", lines[0]);
    }
    Error::Load {
        what: what.into(),
        reason,
    }
}

#[cfg(test)]
#[path = "load_test.rs"]
mod tests;
