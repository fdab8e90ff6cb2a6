use std::{
    ffi::OsString,
    os::unix::ffi::OsStringExt as _,
    sync::mpsc,
    time::{Duration, Instant},
};

use super::*;
use crate::{
    Datapath, Hook, LoadOptions, Owner, Sizes,
    device::Device,
    paths::{RUN, netns_inode},
    pins::abandoned,
    serve,
    tap::EnginePort,
    testing::{make_tap, run, skipped},
};

/// The remains of a killed process, in a namespace that lasts as long as this value.
struct Left {
    paths: Paths,
    /// Dropping this ends the namespace.
    lifeline: mpsc::Sender<Box<dyn FnOnce() + Send>>,
    thread: thread::JoinHandle<()>,
}

impl Left {
    fn new(root: &Path, name: &str, taps: Hook) -> Self {
        let (lifeline, told) = mpsc::channel::<Box<dyn FnOnce() + Send>>();
        let (tell, paths) = mpsc::channel();
        let (root, name) = (root.to_owned(), name.to_owned());
        let thread = thread::spawn(move || {
            // SAFETY: only this thread moves.
            assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0);
            let paths = Paths {
                pin_dir: format!("/sys/fs/bpf/slipgate-gone-{}/{name}", std::process::id()).into(),
                run_dir: root.join(netns_inode().unwrap().to_string()),
            };
            let datapath = Datapath::open(&LoadOptions {
                paths: paths.clone(),
                sizes: Sizes::of_slots(4_096),
                bpf_log: false,
                ipv6: false,
            });
            let datapath = datapath.unwrap();
            let owner = Owner::take(datapath.maps(), &paths, &[]).unwrap();
            let port = EnginePort::open(owner.row(), &mut Vec::new()).unwrap();
            port.serve(&datapath, Hook::Tcx).unwrap();
            serve::serve_tap(&datapath, make_tap("t0"), taps).unwrap();
            drop((port, owner, datapath));
            tell.send(paths).unwrap();
            for task in told {
                task();
            }
        });
        Self {
            paths: paths.recv().unwrap(),
            lifeline,
            thread,
        }
    }

    /// Runs a task in the namespace.
    fn run(&self, task: impl FnOnce() + Send + 'static) {
        let (tell, done) = mpsc::channel();
        let task = move || {
            task();
            tell.send(()).unwrap();
        };
        self.lifeline.send(Box::new(task)).unwrap();
        done.recv().unwrap();
    }

    /// Ends the namespace; the kernel removes its interfaces a moment later.
    fn end(self) -> Paths {
        drop(self.lifeline);
        self.thread.join().unwrap();
        let until = Instant::now() + Duration::from_secs(10);
        while !attach::are_defunct(&self.paths).unwrap() {
            assert!(Instant::now() < until, "the namespace lives on");
            thread::sleep(Duration::from_millis(10));
        }
        self.paths
    }
}

fn sweep_all(root: &Path) -> usize {
    abandoned::sweep_run_dirs_in(root, &|| Err(io::ErrorKind::Unsupported.into()))
}

#[test]
fn pins_go_with_their_namespace_and_not_before() {
    // SAFETY: no arguments.
    if unsafe { libc::geteuid() } != 0 {
        return skipped("pins_go_with_their_namespace", "needs root");
    }
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    assert_ne!(root, Path::new(RUN));
    let (dies, lives, emptied, serves) = (
        // As a daemon leaves it.
        Left::new(root, "dies", Hook::Clsact),
        Left::new(root, "lives", Hook::Clsact),
        Left::new(root, "emptied", Hook::Tcx),
        Left::new(root, "serves", Hook::Tcx),
    );
    let pins = |paths: &Paths| fs::read_dir(&paths.pin_dir).map_or(0, Iterator::count);
    assert_eq!(sweep_all(root), 0);

    // One lives, but all its interfaces were removed by hand.
    emptied.run(|| {
        for name in ["t0", "sgport0"] {
            assert!(Device::named(name).is_ok());
            run(&format!("ip link del {name}"));
        }
    });
    assert!(attach::are_defunct(&emptied.paths).unwrap());
    assert_eq!(sweep_all(root), 0);
    assert!(pins(&emptied.paths) > 0);

    // One namespace is gone and not visible any more; in another one a process lives.
    let dies = dies.end();
    let serves = serves.end();
    let process = FileLock::take(&serves.run_dir.join("owner-0.lock")).unwrap();
    assert!(pins(&dies) > 20, "{}", pins(&dies));
    assert_eq!(sweep_all(root), 1);
    assert!(!dies.pin_dir.exists() && !dies.run_dir.exists());
    assert!(pins(&lives.paths) > 0 && pins(&emptied.paths) > 0 && pins(&serves) > 0);
    drop(process);
    assert_eq!(sweep_all(root), 1);
    assert!(!serves.pin_dir.exists());

    // Held by a mount, or by an open file, it lives too.
    let at = root.with_extension("mounted");
    fs::write(&at, "").unwrap();
    let (tell, file) = mpsc::channel();
    let mount_at = at.clone();
    emptied.run(move || {
        let file = File::open("/proc/thread-self/ns/net").unwrap();
        run(&format!(
            "mount --bind /proc/self/ns/net {}",
            mount_at.display()
        ));
        tell.send(file).unwrap();
    });
    let file = file.recv().unwrap();
    let emptied = emptied.end();
    assert_eq!(sweep_all(root), 0);
    run(&format!("umount {}", at.display()));
    assert_eq!(sweep_all(root), 0);
    drop(file);
    assert_eq!(sweep_all(root), 1);
    assert!(!emptied.pin_dir.exists());

    let lives = lives.end();
    assert_eq!(sweep_all(root), 1);
    assert!(!lives.pin_dir.exists());
    fs::remove_file(at).unwrap();
    fs::remove_dir(lives.pin_dir.parent().unwrap()).unwrap();
}

#[test]
fn a_mounted_namespace_is_found() {
    let line = "211 28 0:4 net:[4026532441] /run/netns/a rw shared:120 - nsfs nsfs rw";
    let at = |name| mounted(line.as_bytes(), name);
    assert_eq!(at("net:[4026532441]"), Some("/run/netns/a".into()));
    assert_eq!(at("net:[4026532442]"), None);
    assert_eq!(mounted(b"", "net:[1]"), None);
    let odd = b"212 28 0:4 net:[4026532442] /run/netns/a\\040b\xff rw - nsfs nsfs rw";
    let path = OsString::from_vec(b"/run/netns/a b\xff".to_vec());
    assert_eq!(mounted(odd, "net:[4026532442]"), Some(path.into()));
}
