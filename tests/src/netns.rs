//! Network namespaces held by a descriptor alone.
//!
//! A namespace lives as long as something holds it: here a descriptor of the test process, the
//! sockets and threads in it, and children spawned into it. Nothing is mounted under `/run/netns`,
//! so nothing is left behind after a panic or a SIGKILL. Code enters by `setns` on a thread of its
//! own; `ip netns exec` would remount `/sys` and hide bpffs.

use std::{
    fmt, fs,
    io::{self, Write},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::{fs::MetadataExt, process::CommandExt},
    },
    path::PathBuf,
    process::{Child, Command, Output, Stdio},
    sync::{Arc, Mutex, MutexGuard, Once, OnceLock, PoisonError, mpsc},
    thread::JoinHandle,
    time::Duration,
};

use crate::{
    error::{Error, Result, Tried, checked},
    owner,
};

/// Default TCP congestion control of namespaces, which is Linux's own default.
pub const CONGESTION_CONTROL: &str = "cubic";
/// The variable that names another one.
const CONGESTION_CONTROL_VARIABLE: &str = "SLIPGATE_CONGESTION_CONTROL";

/// A network namespace. Cheap to clone; gone with the last clone, socket and process in it.
#[derive(Clone)]
pub struct NetNs {
    inner: Arc<Inner>,
}

struct Inner {
    name: String,
    fd: OwnedFd,
    /// The congestion control that its routes are to have.
    by_routes: Mutex<Option<String>>,
}

/// Source of a namespace's congestion control.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum CongestionControlBy {
    /// The namespace's own default.
    Default,
    /// Each of its routes sets it.
    Routes,
}

impl fmt::Display for CongestionControlBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Default => "by sysctl",
            Self::Routes => "by the routes, since this machine allows no namespace to set it",
        })
    }
}

impl fmt::Debug for NetNs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NetNs({}, {})", self.inner.name, self.path().display())
    }
}

impl NetNs {
    /// Makes a namespace with loopback up, IPv6 off on devices that are created in it later, and
    /// Linux's default congestion control unless the environment selects another. `name` is for
    /// messages only.
    ///
    /// # Errors
    /// The kernel refuses the namespace or a setting.
    pub fn new(name: &str) -> Result<Self> {
        set_sigchld_blocked(true);
        let fd = std::thread::scope(|scope| {
            let made = scope.spawn(|| {
                // SAFETY: unshare takes flags only and concerns this thread.
                checked(unsafe { libc::unshare(libc::CLONE_NEWNET) })?;
                fs::File::open("/proc/thread-self/ns/net").map(OwnedFd::from)
            });
            joined(made.join())
        })
        .tried(format!(
            "make the network namespace `{name}` (root is needed)"
        ))?;
        let ns = NetNs {
            inner: Arc::new(Inner {
                name: name.to_owned(),
                fd,
                by_routes: Mutex::default(),
            }),
        };
        ns.ip("link set lo up")?;
        for scope in ["all", "default"] {
            // A kernel without IPv6 has no such key, and needs none.
            let _ = ns.sysctl(&format!("net.ipv6.conf.{scope}.disable_ipv6"), "1");
            ns.sysctl(&format!("net.ipv4.conf.{scope}.rp_filter"), "0")?;
        }
        // Not the machine's own: BBR, for one, paces a bulk stream to a third of what the path has
        // room for.
        let wanted = std::env::var(CONGESTION_CONTROL_VARIABLE);
        let wanted = wanted.as_deref().unwrap_or(CONGESTION_CONTROL);
        if let Err(why) = ns.set_congestion_control(wanted) {
            say_once(&format!("TCP has this machine's congestion control: {why}"));
        }
        Ok(ns)
    }

    /// The namespace that a process is in. `name` is for messages only.
    ///
    /// # Errors
    /// There is no such process, or it is somebody else's.
    pub fn of_process(name: &str, pid: u32) -> Result<Self> {
        let path = format!("/proc/{pid}/ns/net");
        let fd = fs::File::open(&path).tried(format!("open {path}"))?.into();
        Ok(NetNs {
            inner: Arc::new(Inner {
                name: name.to_owned(),
                fd,
                by_routes: Mutex::default(),
            }),
        })
    }

    /// The name it was made with.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// A path that names it for `ip link … netns PATH` or `nsenter --net=PATH`, good while this
    /// process lives.
    pub fn path(&self) -> PathBuf {
        format!(
            "/proc/{}/fd/{}",
            std::process::id(),
            self.inner.fd.as_raw_fd()
        )
        .into()
    }

    /// Runs `f` on a thread inside the namespace and returns its result. A panic is resumed in the
    /// caller. Sockets and threads made in `f` stay in the namespace.
    pub fn run<T: Send>(&self, f: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let handle = std::thread::Builder::new()
                // Keeps the caller's name, so that a panic and a capture name the test.
                .name(
                    std::thread::current()
                        .name()
                        .unwrap_or(self.name())
                        .to_owned(),
                )
                .spawn_scoped(scope, || {
                    self.enter();
                    f()
                })
                .expect("start a thread");
            joined(handle.join())
        })
    }

    /// Starts a thread inside the namespace.
    pub fn thread<T: Send + 'static>(
        &self,
        name: &str,
        f: impl FnOnce() -> T + Send + 'static,
    ) -> JoinHandle<T> {
        let ns = self.clone();
        std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                ns.enter();
                f()
            })
            .expect("start a thread")
    }

    fn enter(&self) {
        if let Err(error) = self.try_enter() {
            panic!("enter the network namespace `{}`: {error}", self.name());
        }
    }

    fn try_enter(&self) -> io::Result<()> {
        // SAFETY: setns takes a descriptor we hold and a flag; it moves this thread alone.
        checked(unsafe { libc::setns(self.inner.fd.as_raw_fd(), libc::CLONE_NEWNET) }).map(drop)
    }

    /// Spawns `command` inside the namespace. The child is killed when this process dies, however
    /// it dies.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn spawn(&self, mut command: Command) -> Result<Child> {
        let parent = std::process::id();
        let die_with_us = move || {
            // SAFETY: both are plain system calls, allowed between fork and exec.
            unsafe {
                checked(libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL))?;
                if libc::getppid() as u32 != parent {
                    return Err(std::io::ErrorKind::Interrupted.into());
                }
            }
            Ok(())
        };
        // SAFETY: `die_with_us` makes system calls only: no allocation, no lock.
        unsafe { command.pre_exec(die_with_us) };
        self.spawn_alone(command)
    }

    /// As [`NetNs::spawn`], but the child outlives a test process that is killed. Without code of ours
    /// between fork and exec the kernel need not copy the test's page tables, which took most of the
    /// CPU time of the end-to-end tests.
    fn spawn_alone(&self, mut command: Command) -> Result<Child> {
        command.env(owner::VARIABLE, owner::token());
        let shown = shown(&command);
        let (reply, answer) = mpsc::channel();
        spawner()
            .send((self.clone(), command, reply))
            .expect("the spawner thread lives as long as the process");
        answer
            .recv()
            .expect("the spawner answers")
            .tried(format!("start `{shown}`"))
    }

    /// Runs `command` inside the namespace to its end.
    ///
    /// # Errors
    /// It exits with another status than 0 (the error has its output), or takes longer than a
    /// minute and is killed.
    pub fn output(&self, command: Command) -> Result<Output> {
        self.output_with(command, &[])
    }

    /// Runs `command` as [`NetNs::output`] does, but accepts further exit statuses.
    ///
    /// # Errors
    /// As [`NetNs::output`].
    pub fn output_with(&self, mut command: Command, fine: &[i32]) -> Result<Output> {
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let shown = shown(&command);
        let child = self.spawn_alone(command)?;
        let watch = Watchdog::start(child.id());
        let output = child.wait_with_output();
        let output = watch.ended(&shown, output.tried(format!("wait for `{shown}`"))?)?;
        let is_fine = output
            .status
            .code()
            .is_some_and(|code| fine.contains(&code));
        if output.status.success() || is_fine {
            return Ok(output);
        }
        let text = if output.stderr.is_empty() {
            &output.stdout
        } else {
            &output.stderr
        };
        Err(Error::Command {
            command: shown,
            status: output.status,
            output: String::from_utf8_lossy(text).trim().to_owned(),
        })
    }

    /// Runs `ip ARGS` (separated by white space) in the namespace and returns its output.
    ///
    /// # Errors
    /// The command fails.
    pub fn ip(&self, args: &str) -> Result<String> {
        let said = self.ip_alone(args)?;
        let changes_routes = |word| ["add", "change", "replace", "up"].contains(&word);
        if args.split_whitespace().any(changes_routes) {
            self.give_routes_the_congestion_control()?;
        }
        Ok(said)
    }

    fn ip_alone(&self, args: &str) -> Result<String> {
        let mut command = Command::new("ip");
        command.args(args.split_whitespace());
        Ok(String::from_utf8_lossy(&self.output(command)?.stdout).into_owned())
    }

    /// Runs `ip -batch` or `tc -batch` on these lines in the namespace.
    ///
    /// # Errors
    /// A line of the batch fails.
    pub fn batch(&self, program: &str, lines: &str) -> Result<()> {
        let file = tempfile::NamedTempFile::new().tried("make a file for a batch")?;
        fs::write(file.path(), lines).tried("write a batch")?;
        let mut command = Command::new(program);
        command.arg("-batch").arg(file.path());
        self.output(command).map(drop)
    }

    /// Loads an nftables ruleset (`nft -f`) in the namespace.
    ///
    /// # Errors
    /// The ruleset is refused.
    pub fn nft(&self, ruleset: &str) -> Result<()> {
        let file = tempfile::NamedTempFile::new().tried("make a file for the nft ruleset")?;
        fs::write(file.path(), ruleset).tried("write the nft ruleset")?;
        let mut command = Command::new("nft");
        command.arg("-f").arg(file.path());
        self.output(command).map(drop)
    }

    /// Sets a sysctl (`net.ipv4.ip_forward`) in the namespace. A device name in the key may not
    /// contain a dot.
    ///
    /// # Errors
    /// The key does not exist, or the value is refused.
    pub fn sysctl(&self, key: &str, value: &str) -> Result<()> {
        let path = format!("/proc/sys/{}", key.replace('.', "/"));
        self.run(|| fs::write(&path, value))
            .tried(format!("write {value} to {path}"))
    }

    /// Sets TCP's congestion control, by the kernel's name, for later connections in the namespace.
    ///
    /// Only the machine's own namespace may have a congestion control as its default that
    /// `tcp_allowed_congestion_control` does not list. In other namespaces it is set on each route
    /// then, including those that [`NetNs::ip`] adds later.
    ///
    /// # Errors
    /// The kernel does not have it.
    pub fn set_congestion_control(&self, name: &str) -> Result<CongestionControlBy> {
        let set = self.sysctl("net.ipv4.tcp_congestion_control", name);
        let number = set.as_ref().err().and_then(Error::os_error);
        let is_refused = matches!(number, Some(libc::EPERM | libc::EACCES));
        let mut by_routes = self.by_routes();
        // A route's goes before the default.
        if is_refused || by_routes.is_some() {
            *by_routes = Some(name.to_owned());
            drop(by_routes);
            self.give_routes_the_congestion_control()?;
            return Ok(CongestionControlBy::Routes);
        }
        set.map(|()| CongestionControlBy::Default)
    }

    fn by_routes(&self) -> MutexGuard<'_, Option<String>> {
        let by_routes = self.inner.by_routes.lock();
        by_routes.unwrap_or_else(PoisonError::into_inner)
    }

    fn give_routes_the_congestion_control(&self) -> Result<()> {
        let Some(name) = self.by_routes().clone() else {
            return Ok(());
        };
        let routes = self.ip_alone("-4 route show")?;
        for route in routes.lines().filter_map(|line| route_with(line, &name)) {
            self.ip_alone(&format!("route replace {route}"))?;
        }
        // To the namespace's own addresses, loopback's among them.
        let own = self.ip_alone("-4 route show table local")?;
        let own = own.lines().filter(|line| line.starts_with("local "));
        for route in own.filter_map(|line| route_with(line, &name)) {
            self.ip_alone(&format!("route replace {route} table local"))?;
        }
        let ipv6 = self.ip_alone("-6 route show")?;
        // Those of a router's advertisement are its own to change; those that refuse lead to no device.
        let is_ours = |line: &&str| !line.contains(" expires ") && !line.contains(" error ");
        let ipv6 = ipv6.lines().filter(is_ours);
        for route in ipv6.filter_map(|line| route_with(line, &name)) {
            self.ip_alone(&format!("-6 route replace {route}"))?;
        }
        Ok(())
    }

    /// The processes in the namespace (this one not among them).
    pub fn processes(&self) -> Vec<u32> {
        let ours = fs::metadata(self.path()).map(|namespace| namespace.ino());
        let Ok(ours) = ours else { return Vec::new() };
        let inside = |pid: &u32| {
            let theirs = fs::metadata(format!("/proc/{pid}/ns/net"));
            theirs.is_ok_and(|namespace| namespace.ino() == ours)
        };
        owner::pids()
            .filter(|pid| *pid != std::process::id())
            .filter(inside)
            .collect()
    }

    /// Kills the processes in the namespace.
    pub(crate) fn kill_processes(&self) {
        self.processes().into_iter().for_each(owner::kill);
    }

    /// The interface index of `device`, if it exists in the namespace.
    pub fn ifindex(&self, device: &str) -> Option<u32> {
        let name = std::ffi::CString::new(device).ok()?;
        // SAFETY: a NUL-terminated string that outlives the call.
        match self.run(|| unsafe { libc::if_nametoindex(name.as_ptr()) }) {
            0 => None,
            index => Some(index),
        }
    }
}

/// A route as `ip route` shows it, as `ip route replace` takes it, with this congestion control.
/// `None`: it has that, or is not one by one device.
fn route_with(shown: &str, name: &str) -> Option<String> {
    let mut words: Vec<&str> = shown.split_whitespace().collect();
    // States of the link, which are shown and not set.
    words.retain(|word| !["linkdown", "dead", "offload", "trap"].contains(word));
    if let Some(at) = words.iter().position(|word| *word == "congctl") {
        if words.get(at + 1) == Some(&name) {
            return None;
        }
        words.drain(at..words.len().min(at + 2));
    }
    let is_by_one_device = !shown.starts_with(char::is_whitespace) && words.contains(&"dev");
    is_by_one_device.then(|| format!("{} congctl {name}", words.join(" ")))
}

/// Prints a message on stderr the first time. Not `eprintln!`: libtest captures its output and
/// shows it for failed tests only.
fn say_once(what: &str) {
    static SAID: Once = Once::new();
    SAID.call_once(|| {
        let _ = writeln!(io::stderr(), "testbed: {what}");
    });
}

fn joined<T>(result: std::thread::Result<T>) -> T {
    result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words
        .map(|word| word.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}

/// Time limit for a command that is run to its end.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);

/// Kills a process that does not end in time.
struct Watchdog {
    ended: mpsc::Sender<()>,
    thread: JoinHandle<bool>,
}

impl Watchdog {
    fn start(pid: u32) -> Watchdog {
        let (ended, wait) = mpsc::channel();
        let thread = std::thread::spawn(move || {
            let late = wait.recv_timeout(COMMAND_TIMEOUT) == Err(mpsc::RecvTimeoutError::Timeout);
            if late {
                owner::kill(pid);
            }
            late
        });
        Watchdog { ended, thread }
    }

    fn ended(self, shown: &str, output: Output) -> Result<Output> {
        let _ = self.ended.send(());
        match joined(self.thread.join()) {
            false => Ok(output),
            true => {
                let seconds = COMMAND_TIMEOUT.as_secs();
                Err(Error::unexpected(format!(
                    "`{shown}` took above {seconds} s and was killed"
                )))
            }
        }
    }
}

type Order = (NetNs, Command, mpsc::Sender<io::Result<Child>>);

/// Blocks SIGCHLD in this thread and those that it starts, or unblocks it.
///
/// A SIGCHLD that nobody handles is discarded when it is sent, unless the thread that started the child
/// blocks it, as the C library does while it starts another. The kernel then wakes any thread that does
/// not block it, and a receive with a time limit in that thread fails with EINTR. Where every test blocks
/// it, that is libtest's own thread, or the one that starts children, which does not block it because
/// children inherit that.
fn set_sigchld_blocked(blocked: bool) {
    let how = match blocked {
        true => libc::SIG_BLOCK,
        false => libc::SIG_UNBLOCK,
    };
    // SAFETY: a set of signals on the stack, which the first call makes valid.
    unsafe {
        let mut set = std::mem::zeroed();
        libc::sigemptyset(&mut set);
        libc::sigaddset(&mut set, libc::SIGCHLD);
        libc::pthread_sigmask(how, &set, std::ptr::null_mut());
    }
}

/// PR_SET_PDEATHSIG fires when the *thread* that forked ends, so one thread that never ends forks. It
/// goes into the child's namespace itself, and back, so as to keep none alive.
fn spawner() -> mpsc::Sender<Order> {
    static SPAWNER: OnceLock<mpsc::Sender<Order>> = OnceLock::new();
    let start = || {
        let (orders, inbox) = mpsc::channel::<Order>();
        std::thread::Builder::new()
            .name("testbed-spawner".into())
            .spawn(move || {
                set_sigchld_blocked(false);
                let home = NetNs::of_process("the test's own", std::process::id());
                let home = home.expect("open this process's network namespace");
                for (ns, mut command, reply) in inbox {
                    let child = ns.try_enter().and_then(|()| command.spawn());
                    home.enter();
                    drop(ns);
                    let _ = reply.send(child);
                }
            })
            .expect("start a thread");
        orders
    };
    SPAWNER.get_or_init(start).clone()
}

#[cfg(test)]
#[path = "netns_test.rs"]
mod tests;
