//! Loaded objects, which tests share one after another. Loading one takes seconds of the verifier, and
//! kernels do not take it well if some thousand programs are freed in a burst. A test that fails keeps
//! its object, so that no other test finds what it left.
use std::{
    io,
    ops::{Deref, DerefMut},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
    thread,
};

use aya::{
    Ebpf, EbpfLoader, Pod,
    maps::{Array, HashMap, LpmTrie, ProgramArray},
    programs::{Program, ProgramError, SchedClassifier},
};
use slipgate_abi::{
    EarlyTag, FlowRef, ForwardKey, ForwardKey6, ForwardTarget, TapEntry, Tuple, Tuple6,
    datapath::{
        PROGRAMS6, Program6,
        fragment_table::{Fragment, Fragment6, PLACES},
    },
    early_fragment::EARLY_CLAIMS,
    forward::{DenyKey, DenyKey6},
    skb::SKB_LAYOUT,
};

use crate::{
    datapath::{HOP, Loaded, OWNER, ROW, TAP, VM, next_hop, owner, vm},
    flow6::vm6,
    mapped::Mapped,
    skipped::skipped,
};

static UNUSED: Mutex<Vec<Loaded>> = Mutex::new(Vec::new());

/// A loaded object in one test's hands.
pub(crate) struct Datapath(Option<Loaded>);

impl Deref for Datapath {
    type Target = Loaded;

    fn deref(&self) -> &Loaded {
        self.0.as_ref().expect("there until it is dropped")
    }
}

impl DerefMut for Datapath {
    fn deref_mut(&mut self) -> &mut Loaded {
        self.0.as_mut().expect("there until it is dropped")
    }
}

impl Drop for Datapath {
    fn drop(&mut self) {
        if !thread::panicking() {
            unused().extend(self.0.take());
        }
    }
}

fn unused() -> std::sync::MutexGuard<'static, Vec<Loaded>> {
    UNUSED.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Datapath {
    /// Returns the datapath with one VM and no flow. Without root prints that the test is skipped,
    /// and returns `None`.
    pub(crate) fn for_test(test: &str) -> Option<Self> {
        // SAFETY: no arguments.
        if unsafe { libc::geteuid() } != 0 {
            skipped(test, "loading BPF programs needs root");
            return None;
        }
        let mut datapath = Self::taken();
        datapath.uplink = TAP;
        datapath.vms.set(ROW, vm());
        datapath.vms6.set(ROW, vm6());
        datapath.owners.set(OWNER, owner());
        datapath.hops.set(HOP, next_hop());
        datapath.set_tap(TAP, VM, ROW);
        Some(datapath)
    }

    /// Returns an object whose maps are empty.
    fn taken() -> Self {
        let taken = unused().pop();
        let mut loaded = taken.unwrap_or_else(Loaded::new);
        loaded.clear();
        Self(Some(loaded))
    }
}

pub(crate) fn object() -> PathBuf {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../target/bpf/slipgate.o");
    std::env::var_os("SLIPGATE_BPF_OBJECT").map_or(root, PathBuf::from)
}

/// Loads a program. The verifier gives up with EAGAIN when it is interrupted; libbpf tries five times.
fn load(name: &str, program: &mut Program) {
    let mut load = || match program {
        Program::SchedClassifier(program) => program.load(),
        Program::Xdp(program) => program.load(),
        _ => panic!("unknown kind of program {name}"),
    };
    let mut loaded = load();
    for _ in 0..4 {
        match &loaded {
            Err(ProgramError::LoadError { io_error, .. })
                if io_error.kind() == io::ErrorKind::WouldBlock =>
            {
                loaded = load();
            }
            _ => break,
        }
    }
    loaded.unwrap_or_else(|error| panic!("load {name}: {error:#?}"));
}

/// Loads an object and its programs, and fills the program array if it has one.
pub(crate) fn load_object(path: &Path) -> Ebpf {
    const SLOTS: u32 = 1_024;
    let skb = slipgate_control::btf::skb_layout().expect("the kernel's BTF");
    let mut ebpf = EbpfLoader::new()
        .override_global(SKB_LAYOUT, &skb, true)
        .map_max_entries("SLOTS", SLOTS)
        .map_max_entries("SEQUENCES", SLOTS)
        .map_max_entries("ADDRESSES6", SLOTS)
        .map_max_entries("FLOWS", SLOTS * 2)
        .map_max_entries("FLOWS6", SLOTS * 2)
        .load_file(path)
        .unwrap_or_else(|error| {
            panic!(
                "{}: {error}; `cargo xtask build --bpf-only` makes it",
                path.display()
            )
        });
    for (name, program) in ebpf.programs_mut() {
        load(name, program);
    }
    if ebpf.map(PROGRAMS6).is_some() {
        fill_array(&mut ebpf);
    }
    ebpf
}

/// Puts the programs for IPv6 into their array.
fn fill_array(ebpf: &mut Ebpf) {
    for program in Program6::ALL {
        let classifier: &SchedClassifier =
            ebpf.program(program.name()).unwrap().try_into().unwrap();
        let fd = classifier.fd().unwrap().try_clone().expect("a descriptor");
        ProgramArray::try_from(ebpf.map_mut(PROGRAMS6).unwrap())
            .expect(PROGRAMS6)
            .set(program as u32, &fd, 0)
            .expect("set PROGRAMS6");
    }
}

impl Loaded {
    fn new() -> Self {
        let ebpf = load_object(&object());
        Self {
            slots: Mapped::of(&ebpf, "SLOTS"),
            sequences: Mapped::of(&ebpf, "SEQUENCES"),
            addresses6: Mapped::of(&ebpf, "ADDRESSES6"),
            vms: Mapped::of(&ebpf, "VMS"),
            vms6: Mapped::of(&ebpf, "VMS6"),
            owners: Mapped::of(&ebpf, "OWNERS"),
            drops: Mapped::of(&ebpf, "DROPS"),
            hops: Mapped::of(&ebpf, "NEXT_HOPS"),
            rates: Mapped::of(&ebpf, "RATES"),
            uplink: TAP,
            ebpf,
        }
    }

    /// Calls this while the array of programs for IPv6 is empty, as it is without IPv6.
    pub(crate) fn without_programs6(&mut self, body: impl FnOnce(&Self)) {
        let mut array = ProgramArray::try_from(self.ebpf.map_mut(PROGRAMS6).unwrap()).unwrap();
        for program in Program6::ALL {
            array.clear_index(&(program as u32)).unwrap();
        }
        body(self);
        fill_array(&mut self.ebpf);
    }

    /// Makes all maps that the programs use empty.
    fn clear(&mut self) {
        self.slots.clear();
        self.sequences.clear();
        self.addresses6.clear();
        self.vms.clear();
        self.vms6.clear();
        self.owners.clear();
        self.drops.clear();
        self.hops.clear();
        self.rates.clear();
        for map in ["EARLY_TAGS", EARLY_CLAIMS] {
            Mapped::<EarlyTag>::of(&self.ebpf, map).clear();
        }
        clear_hash::<Tuple, FlowRef>(&mut self.ebpf, "FLOWS");
        clear_hash::<Tuple6, FlowRef>(&mut self.ebpf, "FLOWS6");
        clear_hash::<u32, TapEntry>(&mut self.ebpf, "TAPS");
        clear_hash::<ForwardKey, ForwardTarget>(&mut self.ebpf, "FORWARDS");
        clear_hash::<ForwardKey6, ForwardTarget>(&mut self.ebpf, "FORWARDS6");
        clear_trie::<DenyKey>(&mut self.ebpf, "DENY");
        clear_trie::<DenyKey6>(&mut self.ebpf, "DENY6");
        clear_table::<{ size_of::<Fragment>() }>(&mut self.ebpf, "PIECES");
        clear_table::<{ size_of::<Fragment6>() }>(&mut self.ebpf, "PIECES6");
    }
}

/// Empties a table of fragments.
fn clear_table<const BYTES: usize>(ebpf: &mut Ebpf, name: &str)
where
    [u8; BYTES]: Pod,
{
    let map = ebpf.map_mut(name).unwrap();
    let mut table = Array::<_, [u8; BYTES]>::try_from(map).expect(name);
    for place in 0..PLACES as u32 {
        table.set(place, [0; BYTES], 0).expect(name);
    }
}

fn clear_trie<K: Pod>(ebpf: &mut Ebpf, name: &str) {
    let mut trie = LpmTrie::<_, K, u32>::try_from(ebpf.map_mut(name).unwrap()).expect(name);
    let keys: Vec<_> = trie.keys().map(|key| key.expect(name)).collect();
    for key in keys {
        trie.remove(&key).expect(name);
    }
}

fn clear_hash<K: Pod, V: Pod>(ebpf: &mut Ebpf, name: &str) {
    let mut map = HashMap::<_, K, V>::try_from(ebpf.map_mut(name).unwrap()).expect(name);
    let keys: Vec<K> = map.keys().map(|key| key.expect(name)).collect();
    for key in keys {
        map.remove(&key).expect(name);
    }
}
