//! Pause, snapshot and restore under KVM, with a guest of a few instructions.
use std::{
    fs::{self, File},
    io::{PipeReader, PipeWriter, Read, Write, pipe},
    path::Path,
    sync::atomic::AtomicBool,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use slipgate_testbed::require_kvm;
use slipgate_vmm::{
    Control, Devices, Machine, MachineConfig, MachineError, Origin, Outcome, SerialIo,
    SnapshotFiles, StopHandle, ThreadSetup,
    boot::{BootSource, Kernel},
    snapshot::{SavedFiles, SnapshotError},
};

mod payload;
use payload::Code;

const MEMORY: u64 = 16 << 20;
const WAIT: Duration = Duration::from_secs(20);

/// Code that answers each byte that is typed by the byte typed before, which it keeps in memory,
/// and by the number of bytes so far, which it keeps in a register.
fn echo() -> Code {
    Code::new()
        // mov ecx, '0'
        .raw(&[0xb9, b'0', 0, 0, 0])
        // mov dx, 0x3fd; in al, dx; test al, 1; jz back
        .raw(&[0x66, 0xba, 0xfd, 0x03, 0xec, 0xa8, 0x01, 0x74, 0xf7])
        // mov dx, 0x3f8; in al, dx; mov bl, [0x200000]; mov [0x200000], al
        .raw(&[0x66, 0xba, 0xf8, 0x03, 0xec])
        .raw(&[0x8a, 0x1d, 0, 0, 0x20, 0, 0xa2, 0, 0, 0x20, 0])
        // mov al, bl; out dx, al; inc ecx; mov al, cl; out dx, al; mov al, '\n'; out dx, al
        .raw(&[0x88, 0xd8, 0xee, 0x41, 0x88, 0xc8, 0xee, 0xb0, b'\n', 0xee])
        // jmp back
        .raw(&[0xeb, 0xdb])
}

/// A machine that runs, and the host side of its console.
struct Running {
    typed: PipeWriter,
    printed: PipeReader,
    control: Control,
    stop: StopHandle,
    thread: Option<JoinHandle<Outcome>>,
}

fn config(origin: Origin, cpus: u8) -> (MachineConfig, PipeWriter, PipeReader) {
    let (input, typed) = pipe().unwrap();
    let (printed, output) = pipe().unwrap();
    let kvm = File::options().read(true).write(true).open("/dev/kvm");
    let config = MachineConfig {
        template: slipgate_vmm::cpuid::Template::Host,
        huge_pages: false,
        cpus,
        memory_bytes: MEMORY,
        origin,
        devices: Devices {
            net: None,
            disks: Vec::new(),
            vsock: None,
            balloon: None,
            serial: SerialIo {
                input: Some(input.into()),
                limit_bytes: None,
                output: output.into(),
            },
        },
        kvm: kvm.unwrap().into(),
        threads: ThreadSetup::new(|_| Ok(())),
    };
    (config, typed, printed)
}

fn booting(code: &Code) -> Origin {
    Origin::Boot(BootSource {
        kernel: Kernel::Bytes(code.image()),
        initrd: None,
        cmdline: String::new(),
    })
}

impl Running {
    fn start(origin: Origin, cpus: u8) -> Result<Self, MachineError> {
        let (config, typed, printed) = config(origin, cpus);
        let machine = Machine::new(config)?;
        Ok(Self {
            typed,
            printed,
            control: machine.control(),
            stop: machine.stop_handle().unwrap(),
            thread: Some(thread::spawn(move || machine.run())),
        })
    }

    /// Types a byte and returns the answer.
    fn ask(&mut self, byte: u8) -> [u8; 2] {
        self.typed.write_all(&[byte]).unwrap();
        let mut answer = [0; 3];
        self.printed.read_exact(&mut answer).unwrap();
        assert_eq!(answer[2], b'\n');
        [answer[0], answer[1]]
    }

    fn end(&mut self) -> Outcome {
        self.stop.stop();
        self.thread.take().unwrap().join().unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.thread.is_some() {
            self.end();
        }
    }
}

fn new_files(folder: &Path) -> SnapshotFiles {
    SnapshotFiles {
        state: File::create(folder.join("state")).unwrap(),
        memory: File::create(folder.join("memory")).unwrap(),
    }
}

fn saved(folder: &Path) -> Origin {
    Origin::Snapshot {
        state: File::open(folder.join("state")).unwrap(),
        memory: File::open(folder.join("memory")).unwrap(),
        bases: Vec::new(),
    }
}

#[test]
fn a_paused_guest_does_not_run_and_goes_on() {
    require_kvm!();
    let mut vm = Running::start(booting(&echo()), 2).unwrap();
    assert_eq!(vm.ask(b'a'), [0, b'1']);
    vm.control.pause().unwrap();
    vm.control.pause().unwrap();
    vm.typed.write_all(b"b").unwrap();
    thread::sleep(Duration::from_millis(50));
    let mut nothing = [libc::pollfd {
        fd: std::os::fd::AsRawFd::as_raw_fd(&vm.printed),
        events: libc::POLLIN,
        revents: 0,
    }];
    // SAFETY: one element, which outlives the call.
    assert_eq!(unsafe { libc::poll(nothing.as_mut_ptr(), 1, 0) }, 0);
    vm.control.resume().unwrap();
    let mut answer = [0; 3];
    vm.printed.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"a2\n");
    vm.control.resume().unwrap();
    assert_eq!(vm.ask(b'c'), [b'b', b'3']);
}

#[test]
fn a_stop_ends_a_paused_machine_and_its_control() {
    require_kvm!();
    let mut vm = Running::start(booting(&echo()), 2).unwrap();
    vm.control.pause().unwrap();
    let began = Instant::now();
    assert!(matches!(vm.end(), Outcome::Stopped));
    assert!(began.elapsed() < Duration::from_secs(5));
    for refused in [vm.control.pause(), vm.control.resume()] {
        assert!(matches!(refused, Err(SnapshotError::Ended)), "{refused:?}");
    }
}

#[test]
fn machines_go_on_from_a_snapshot_each_on_its_own() {
    require_kvm!();
    let folder = tempfile::tempdir().unwrap();
    let mut vm = Running::start(booting(&echo()), 2).unwrap();
    assert_eq!(vm.ask(b'a'), [0, b'1']);
    assert_eq!(vm.ask(b'b'), [b'a', b'2']);
    vm.control
        .snapshot(&new_files(folder.path()), &AtomicBool::new(false))
        .unwrap();
    // The original goes on.
    assert_eq!(vm.ask(b'c'), [b'b', b'3']);
    vm.end();

    let memory = fs::metadata(folder.path().join("memory")).unwrap();
    assert_eq!(memory.len(), MEMORY);
    let mut clones: Vec<_> = (0..3)
        .map(|_| Running::start(saved(folder.path()), 2).unwrap())
        .collect();
    for (clone, byte) in clones.iter_mut().zip(b'p'..) {
        assert_eq!(clone.ask(byte), [b'b', b'3']);
        assert_eq!(clone.ask(b'z'), [byte, b'4']);
    }
    // A clone may be saved in its turn.
    let again = tempfile::tempdir().unwrap();
    clones[0].control.pause().unwrap();
    clones[0]
        .control
        .snapshot(&new_files(again.path()), &AtomicBool::new(false))
        .unwrap();
    drop(clones);
    let mut grandchild = Running::start(saved(again.path()), 2).unwrap();
    assert_eq!(grandchild.ask(b'!'), [b'z', b'5']);
}

#[test]
fn what_does_not_fit_is_refused() {
    require_kvm!();
    let folder = tempfile::tempdir().unwrap();
    let mut vm = Running::start(booting(&echo()), 1).unwrap();
    vm.ask(b'a');
    vm.control
        .snapshot(&new_files(folder.path()), &AtomicBool::new(false))
        .unwrap();
    drop(vm);
    let refused = |origin, cpus| match Running::start(origin, cpus) {
        Ok(_) => panic!("it was restored"),
        Err(e) => e.to_string(),
    };
    let why = refused(saved(folder.path()), 2);
    assert!(why.contains("it has 1 CPUs"), "{why}");

    let memory = folder.path().join("memory");
    let file = File::options().write(true).open(&memory).unwrap();
    file.set_len(MEMORY / 2).unwrap();
    let why = refused(saved(folder.path()), 1);
    assert!(why.contains("it is not whole"), "{why}");
    file.set_len(MEMORY).unwrap();

    let state = folder.path().join("state");
    let mut bytes = fs::read(&state).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&state, &bytes).unwrap();
    let why = refused(saved(folder.path()), 1);
    assert!(why.contains("its digest is of other bytes"), "{why}");
    fs::write(&state, b"").unwrap();
    assert!(refused(saved(folder.path()), 1).contains("no state of a machine"));
}

#[test]
fn files_that_can_not_be_written_leave_the_machine_running() {
    require_kvm!();
    let mut vm = Running::start(booting(&echo()), 1).unwrap();
    vm.ask(b'a');
    let read_only = || File::open("/dev/null").unwrap();
    let files = SnapshotFiles {
        state: read_only(),
        memory: read_only(),
    };
    let refused = vm
        .control
        .snapshot(&files, &AtomicBool::new(false))
        .unwrap_err();
    assert!(matches!(refused, SnapshotError::File { .. }), "{refused}");
    assert_eq!(vm.ask(b'b'), [b'a', b'2']);
}

#[test]
fn a_snapshot_that_nobody_wants_is_not_written() {
    require_kvm!();
    let folder = tempfile::tempdir().unwrap();
    let mut vm = Running::start(booting(&echo()), 1).unwrap();
    vm.ask(b'a');
    let files = new_files(folder.path());
    let refused = vm.control.snapshot(&files, &AtomicBool::new(true));
    assert!(
        matches!(refused, Err(SnapshotError::Cancelled)),
        "{refused:?}"
    );
    assert_eq!(files.memory.metadata().unwrap().len(), 0);
    assert_eq!(vm.ask(b'b'), [b'a', b'2']);
}

#[test]
fn orders_of_many_threads_at_once_do_no_harm() {
    require_kvm!();
    let mut vm = Running::start(booting(&echo()), 2).unwrap();
    let until = Instant::now() + Duration::from_millis(500);
    thread::scope(|scope| {
        for _ in 0..3 {
            let control = vm.control.clone();
            scope.spawn(move || {
                while Instant::now() < until {
                    control.pause().unwrap();
                    control.resume().unwrap();
                }
            });
        }
    });
    assert!(Instant::now() < until + WAIT);
    assert_eq!(vm.ask(b'a'), [0, b'1']);
}

fn files(folder: &Path) -> SavedFiles {
    SavedFiles {
        state: File::open(folder.join("state")).unwrap(),
        memory: File::open(folder.join("memory")).unwrap(),
    }
}

#[test]
fn a_machine_goes_on_from_differences_on_their_base() {
    require_kvm!();
    let folders = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let [lowest, middle, top] = folders.each_ref().map(|folder| folder.path());
    let wanted = AtomicBool::new(false);
    let mut vm = Running::start(booting(&echo()), 1).unwrap();
    vm.ask(b'a');
    vm.control.snapshot(&new_files(lowest), &wanted).unwrap();
    assert_eq!(vm.ask(b'b'), [b'a', b'2']);
    let bases = vec![files(lowest)];
    vm.control
        .differences(&new_files(middle), bases, &wanted)
        .unwrap();
    assert_eq!(vm.ask(b'c'), [b'b', b'3']);
    drop(vm);
    // What was restored is saved again, on both.
    let on = |folder: &Path, bases: &[&Path]| match saved(folder) {
        Origin::Snapshot { state, memory, .. } => Origin::Snapshot {
            state,
            memory,
            bases: bases.iter().map(|base| files(base)).collect(),
        },
        Origin::Boot(_) => unreachable!("a snapshot"),
    };
    let mut vm = Running::start(on(middle, &[lowest]), 1).unwrap();
    assert_eq!(vm.ask(b'x'), [b'b', b'3']);
    let bases = vec![files(middle), files(lowest)];
    vm.control
        .differences(&new_files(top), bases, &wanted)
        .unwrap();
    drop(vm);
    let mut vm = Running::start(on(top, &[middle, lowest]), 1).unwrap();
    assert_eq!(vm.ask(b'y'), [b'x', b'4']);
    drop(vm);
    // Few pages differ.
    use std::os::unix::fs::MetadataExt as _;
    let data = fs::metadata(top.join("memory")).unwrap();
    assert_eq!(data.len(), MEMORY);
    assert!(data.blocks() * 512 <= 64 << 10, "{}", data.blocks());
    // Without its base, or with another in its place, it is nothing.
    for (bases, why) in [
        (&[][..], "is missing"),
        (&[lowest], "in the place of that"),
        (&[middle], "is missing"),
    ] {
        let refused = Running::start(on(top, bases), 1).err().unwrap();
        let refused = with_causes(&refused);
        assert!(refused.contains(why), "{refused}");
    }
}

/// An error with its causes.
fn with_causes(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(": ")
}
