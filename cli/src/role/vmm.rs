//! The VMM process: runs one guest with the descriptors that it was given: KVM, the queues of the
//! guest's TAP, a kernel, a console.
//!
//! It confines itself for good before it is told of its machine ([`crate::sandbox::vmm`]), while the
//! broker opens what that is made of. It makes the machine, and waits for the broker's message that the TAP is
//! served. It has three threads of its own: the main one waits for the guest's end, one listens to
//! the broker, and one carries out orders, so that a stop is heard during a snapshot.
use std::{
    fs::File,
    io::{self, Seek as _, SeekFrom},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::FileTypeExt as _,
    },
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Release},
        mpsc,
    },
    time::Duration,
};

use anyhow::{Context as _, bail};
use slipgate_ipc::{
    channel::Channel,
    client::SnapshotBase,
    vmm::{
        CpuTemplate, DiskCache, FromVmm, GuestEnd, RateLimit, ToVmm, TokenBucket, VmmDisk, VmmEnd,
        VmmOrder, VmmSnapshot, VmmStart, VmmTimes,
    },
    vsock::RequestWriter,
};
use slipgate_vmm::{
    Control, Counters, Devices, Machine, MachineConfig, MachineError, Origin, Outcome, SerialIo,
    SnapshotFiles, Starting, StopHandle, ThreadSetup,
    boot::{BootInput, BootSource, Kernel},
    cpuid::{CpuidError, Template},
    memory::MemoryError,
    snapshot::SavedFiles,
    thread,
    virtio::{
        balloon::BalloonConfig,
        block::{Cache, DiskConfig, MAX_QUEUES},
        net::{NetConfig, NetRates},
        rate::{BucketConfig, RateConfig},
        vsock::{Answer, Connector, VsockConfig},
    },
};

use super::inherited_channel;
use crate::{args::ChildArgs, log, sandbox::vmm as sandbox};

/// Bytes of a snapshot's file that may be written beyond the size of the memory.
const MORE_THAN_MEMORY: u64 = 16 << 20;

/// Bytes that the VMM may write to a file of messages (stderr) behind its end.
const MESSAGE_BYTES: u64 = 64 << 20;

/// The built-in guest: an ELF file with a PVH note; empty where the build had none to embed.
static BUILT_IN: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/slipgate-guest"));

/// The built-in guest.
///
/// # Errors
/// When this binary was built without it.
pub(crate) fn built_in_guest() -> anyhow::Result<&'static [u8]> {
    unless_stub(BUILT_IN)
}

fn unless_stub(image: &[u8]) -> anyhow::Result<&[u8]> {
    if image.is_empty() {
        bail!(
            "this slipgate was built without the built-in guest, with an empty stub in its place: \
             build it by `cargo xtask build`, or name a kernel with --kernel"
        );
    }
    Ok(image)
}

/// Runs until the guest ends or the broker sends a stop.
pub(crate) fn run(args: &ChildArgs) -> anyhow::Result<()> {
    let began_at_us = monotonic_us();
    let broker = nix::unistd::getppid();
    let channel = Arc::new(inherited_channel("vmm", args.fd)?);
    let Some(ToVmm::<OwnedFd>::Confine(jail)) = channel.receive()? else {
        bail!("the broker ended before it said how to confine this process");
    };
    log::to_stderr(&jail.log)?;
    write_from_the_background();
    let refused = sandbox::enter(broker, args.user, jail.in_namespaces)?;
    let confined_at_us = monotonic_us();
    let start = match channel.receive()? {
        Some(ToVmm::Start(start)) => start,
        Some(_) => bail!("the broker sent another message in the place of the machine's settings"),
        None => bail!("the broker ended before it sent the machine's settings"),
    };
    let told_at_us = monotonic_us();
    if let Some(refused) = refused.map(anyhow::Error::from) {
        if jail.required {
            let (flag, why) = (Some("--jail".to_owned()), format!("{refused:#}"));
            channel.send(FromVmm::Failed { flag, why })?;
            return Ok(());
        }
        tracing::warn!(
            "the VMM is without some of its namespaces ({refused:#}); `slipgate doctor` says why, \
             --jail required refuses to run so"
        );
    }
    sandbox::limit_files(most_written(&start)?)?;
    let may_restart = start.may_restart;
    let is_restored = start.snapshot.is_some();
    let machine = match make(*start) {
        Ok(machine) => machine,
        Err(e) => {
            let (flag, why) = (blamed_flag(&e, is_restored), format!("{e:#}"));
            channel.send(FromVmm::Failed { flag, why })?;
            return Ok(());
        }
    };
    let counters = machine.counters();
    let (orders, carrying_out) = carry_out(channel.clone(), machine.control())?;
    // All threads are there before the broker is told, which has something to do meanwhile.
    let (go, gone) = mpsc::sync_channel(1);
    let (again, agreed) = mpsc::sync_channel(1);
    let listener = Listener {
        channel: channel.clone(),
        counters: counters.clone(),
        orders,
        stop: machine.stop_handle()?,
        go: Some(go),
        again,
    };
    let listening = listener.start()?;
    // No thread is made from here on, and no guest code runs before every thread is confined.
    sandbox::narrow(sandbox::Thread::Main, may_restart)?;
    for thread in [carrying_out, listening] {
        thread.finish().context("confining a thread")?;
    }
    channel.send(FromVmm::Ready(VmmTimes {
        confined_us: confined_at_us - began_at_us,
        made_us: monotonic_us() - told_at_us,
    }))?;
    if gone.recv().is_err() {
        // It is to stop, or the broker has ended.
        return Ok(());
    }
    let began_us = monotonic_us();
    let mut restarts = 0;
    let outcome = machine.run_again(|outcome| {
        let report = match outcome {
            Outcome::Crashed(report) => Some(report.to_string()),
            _ => None,
        };
        let begins = channel.send(FromVmm::Reset { report }).is_ok() && agreed.recv() == Ok(true);
        restarts += u64::from(begins);
        begins
    });
    let ran_us = monotonic_us() - began_us;
    let counters = counters.snapshot();
    let lost = counters.serial.output_lost_bytes;
    if lost > 0 {
        tracing::warn!(
            "{lost} bytes that the guest printed were lost: nobody read the console, or it is a file \
             and reached --console-limit"
        );
    }
    let line_at_us = counters.serial.first_line_at_us;
    let end = VmmEnd {
        outcome: guest_end(outcome),
        first_line_us: (line_at_us > 0).then(|| line_at_us.saturating_sub(began_us)),
        counters: serde_json::to_value(counters)?,
        ran_us,
        restarts,
    };
    channel.send(FromVmm::Ended(Box::new(end)))?;
    Ok(())
}

/// Offset behind which the VMM writes to no file: the end of the largest of its disks and of a
/// snapshot of its memory, and as much more for the console's file and that of its messages as may be
/// printed.
fn most_written(start: &VmmStart) -> anyhow::Result<u64> {
    let size = |fd: &OwnedFd| -> std::io::Result<u64> {
        let mut file = File::from(fd.try_clone()?);
        let data = file.metadata()?;
        match data.file_type().is_block_device() {
            true => file.seek(SeekFrom::End(0)),
            false => Ok(data.len()),
        }
    };
    let mut most = start.memory_bytes.saturating_add(MORE_THAN_MEMORY);
    for disk in &start.disks {
        most = most.max(size(&disk.file).context("looking at a disk's size")?);
    }
    if let Some(limit) = limit(&start.output, start.console_bytes) {
        let there = size(&start.output).context("looking at the console's file")?;
        most = most.max(there.saturating_add(limit));
    }
    let messages = std::io::stderr().as_fd().try_clone_to_owned();
    let messages = messages.context("looking at stderr")?;
    if let Some(limit) = limit(&messages, MESSAGE_BYTES) {
        let there = size(&messages).context("looking at the file of messages")?;
        most = most.max(there.saturating_add(limit));
    }
    Ok(most)
}

/// Most that is written to a console or as messages: a terminal's or a pipe's reader decides by itself.
fn limit(output: &OwnedFd, bytes: u64) -> Option<u64> {
    let file = File::from(output.try_clone().ok()?);
    let is_file = file.metadata().is_ok_and(|data| data.is_file());
    is_file.then_some(bytes)
}

/// The scale of the console's counters.
fn monotonic_us() -> u64 {
    use userspace_nat::clock::{Clock as _, SystemClock};
    SystemClock.now_ns() / 1_000
}

/// Makes writes to the terminal possible from a background process group, which the terminal would
/// otherwise stop if `tostop` is set.
fn write_from_the_background() {
    let ignored = nix::sys::signal::SigHandler::SigIgn;
    // SAFETY: no handler is installed.
    let _ = unsafe { nix::sys::signal::signal(nix::sys::signal::Signal::SIGTTOU, ignored) };
}

fn make(start: VmmStart) -> anyhow::Result<Machine> {
    let origin = match (start.snapshot, start.kernel) {
        (
            Some(VmmSnapshot {
                state,
                memory,
                bases,
            }),
            _,
        ) => Origin::Snapshot {
            state: state.into(),
            memory: memory.into(),
            bases: opened(bases),
        },
        (None, kernel) => Origin::Boot(BootSource {
            kernel: match kernel {
                Some(image) => Kernel::File(File::from(image)),
                None => Kernel::Bytes(built_in_guest()?),
            },
            initrd: start.initrd.map(File::from),
            cmdline: start.cmdline,
        }),
    };
    let mut net = NetConfig::new(start.mac, start.mtu, start.taps);
    net.shared = start.shared.map(File::from);
    net.rates = NetRates {
        tx: rate(start.net_rates.tx),
        rx: rate(start.net_rates.rx),
    };
    let may_restart = start.may_restart;
    let config = MachineConfig {
        cpus: start.cpus,
        memory_bytes: start.memory_bytes,
        huge_pages: start.huge_pages,
        template: match start.cpu_template {
            CpuTemplate::Host => Template::Host,
            CpuTemplate::X86_64V1 => Template::X86_64V1,
            CpuTemplate::X86_64V2 => Template::X86_64V2,
            CpuTemplate::X86_64V3 => Template::X86_64V3,
        },
        origin,
        devices: Devices {
            net: Some(net),
            disks: (start.disks.into_iter())
                .map(|it| disk(it, start.cpus))
                .collect(),
            vsock: start.vsock.map(|listener| VsockConfig {
                cid: start.vsock_cid,
                listener: listener.into(),
                connector: start
                    .vsock_requests
                    .map(|socket| Box::new(Programs(RequestWriter::new(socket))) as _),
            }),
            balloon: start.balloon_mib.map(|mib| BalloonConfig {
                target_bytes: mib << 20,
            }),
            serial: SerialIo {
                input: Some(start.input),
                limit_bytes: limit(&start.output, start.console_bytes),
                output: start.output,
            },
        },
        kvm: start.kvm,
        threads: ThreadSetup::new(move |kind| {
            sandbox::narrow(sandbox::Thread::Of(kind), may_restart)
        }),
    };
    Ok(match may_restart {
        true => Machine::restartable(config)?,
        false => Machine::new(config)?,
    })
}

// What the broker sends is what the machine takes.
const _: () = assert!(slipgate_ipc::client::MAX_BASES == slipgate_vmm::snapshot::MAX_BASES);

fn opened(bases: Vec<SnapshotBase>) -> Vec<SavedFiles> {
    let files = |base: SnapshotBase| SavedFiles {
        state: base.state.into(),
        memory: base.memory.into(),
    };
    bases.into_iter().map(files).collect()
}

/// The thread of the broker that connects the guest to programs of the host.
#[derive(Debug)]
struct Programs(RequestWriter);

impl Connector for Programs {
    fn ask(&self, id: u32, port: u32) -> io::Result<()> {
        self.0.ask(id, port)
    }

    fn next(&self) -> io::Result<Option<Answer>> {
        let answer = self.0.next()?;
        Ok(answer.map(|(id, socket)| Answer { id, socket }))
    }
}

impl AsFd for Programs {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn disk(disk: VmmDisk, cpus: u8) -> DiskConfig {
    let VmmDisk {
        file,
        read_only,
        cache,
        rate: limit,
    } = disk;
    DiskConfig {
        file: file.into(),
        read_only,
        cache: match cache {
            DiskCache::WriteBack => Cache::WriteBack,
            DiskCache::WriteThrough => Cache::WriteThrough,
            DiskCache::Unsafe => Cache::Unsafe,
            DiskCache::None => Cache::None,
        },
        queues: u16::from(cpus).clamp(1, MAX_QUEUES),
        rate: rate(limit),
    }
}

fn rate(limit: RateLimit) -> RateConfig {
    let bucket = |bucket: Option<TokenBucket>| {
        bucket.map(|it| BucketConfig {
            size: it.size,
            one_time_burst: it.one_time_burst,
            refill: Duration::from_millis(it.refill_ms),
        })
    };
    RateConfig {
        bytes: bucket(limit.bytes),
        operations: bucket(limit.operations),
    }
}

/// Flag whose value prevents the creation of the machine.
fn blamed_flag(error: &anyhow::Error, is_restored: bool) -> Option<String> {
    let error = match error.downcast_ref() {
        Some(MachineError::Boot(error)) => error,
        Some(MachineError::Memory(MemoryError::HugePages { .. })) => {
            return Some("--huge-pages".to_owned());
        }
        Some(MachineError::Cpuid(CpuidError::Lacks { .. })) if !is_restored => {
            return Some("--cpu-template".to_owned());
        }
        Some(
            MachineError::Snapshot(_)
            | MachineError::Memory(_)
            | MachineError::Cpuid(CpuidError::Lacks { .. }),
        ) => {
            return Some("--restore".to_owned());
        }
        _ => return None,
    };
    let flag = match error.about()? {
        BootInput::Kernel => "--kernel",
        BootInput::Initrd => "--initrd",
        BootInput::CommandLine => "--cmdline",
    };
    Some(flag.to_owned())
}

/// An order for the thread that carries them out.
struct Ordered {
    id: u64,
    order: VmmOrder,
    /// Whether nobody waits for it any more. It goes with the order.
    cancelled: Arc<AtomicBool>,
}

/// The thread that reads the broker's messages.
struct Listener {
    channel: Arc<Channel>,
    counters: Arc<Counters>,
    orders: mpsc::Sender<Ordered>,
    stop: StopHandle,
    /// Lets the guest run; `None` once it has. Who waits for it is told of a stop by its end.
    go: Option<mpsc::SyncSender<()>>,
    /// Takes the answers to resets. Who waits for one is told of a stop by its end.
    again: mpsc::SyncSender<bool>,
}

impl Listener {
    /// Starts its thread, which confines itself first.
    fn start(self) -> anyhow::Result<Starting> {
        let narrow = || sandbox::narrow(sandbox::Thread::Channel, false);
        let listen = move || self.listen();
        let (_, starting) =
            thread::spawn_set_up("channel", narrow, listen).context("starting a thread")?;
        Ok(starting)
    }

    fn listen(mut self) {
        // Orders that may still be cancelled.
        let mut under_way: Vec<(u64, Arc<AtomicBool>)> = Vec::new();
        loop {
            match self.channel.receive::<ToVmm>() {
                Ok(Some(ToVmm::Counters { id })) => {
                    let counters = self.counters.snapshot();
                    let counters = serde_json::to_value(counters).unwrap_or_default();
                    // It does not wait: an answer that finds no room is one that nobody reads.
                    let _ = self.channel.try_send(FromVmm::Counters { id, counters });
                }
                Ok(Some(ToVmm::Go)) => {
                    if let Some(go) = self.go.take() {
                        // Whoever waits for it waits until this thread ends.
                        let _ = go.send(());
                    }
                }
                Ok(Some(ToVmm::Order { id, .. })) if self.go.is_some() => {
                    let error = Some("the guest does not run yet".to_owned());
                    let _ = self.channel.try_send(FromVmm::Carried { id, error });
                }
                Ok(Some(ToVmm::Order { id, order })) => {
                    let cancelled = Arc::new(AtomicBool::new(false));
                    // Those that are carried out are held here only.
                    under_way.retain(|(_, cancelled)| Arc::strong_count(cancelled) > 1);
                    under_way.push((id, cancelled.clone()));
                    // The other thread ends with this one.
                    let _ = self.orders.send(Ordered {
                        id,
                        order,
                        cancelled,
                    });
                }
                Ok(Some(ToVmm::Cancel { id })) => {
                    let ordered = under_way.iter().filter(|(other, _)| *other == id);
                    ordered.for_each(|(_, cancelled)| cancelled.store(true, Release));
                }
                Ok(Some(ToVmm::AfterReset { begins })) => {
                    // One that nobody asked for is dropped with the next.
                    let _ = self.again.try_send(begins);
                }
                Ok(Some(ToVmm::Confine(_) | ToVmm::Start(_))) => {}
                // The broker's end is ours.
                Ok(Some(ToVmm::Stop) | None) | Err(_) => return self.stop.stop(),
            }
        }
    }
}

/// Starts the thread that carries out orders, which confines itself first.
fn carry_out(
    channel: Arc<Channel>,
    control: Control,
) -> anyhow::Result<(mpsc::Sender<Ordered>, Starting)> {
    let (sender, orders) = mpsc::channel::<Ordered>();
    let narrow = || sandbox::narrow(sandbox::Thread::Orders, false);
    let carry_out = move || {
        for ordered in orders {
            let id = ordered.id;
            let done = match ordered.order {
                VmmOrder::Pause => control.pause(),
                VmmOrder::Resume => control.resume(),
                VmmOrder::Balloon { mib } => control.set_balloon(mib.saturating_mul(1 << 20)),
                VmmOrder::Snapshot(VmmSnapshot {
                    state,
                    memory,
                    bases,
                }) => {
                    let files = SnapshotFiles {
                        state: state.into(),
                        memory: memory.into(),
                    };
                    control.differences(&files, opened(bases), &ordered.cancelled)
                }
            };
            let error = done.err().map(|e| format!("{:#}", anyhow::Error::from(e)));
            // The broker has at most so many orders under way as have room.
            let _ = channel.try_send(FromVmm::Carried { id, error });
        }
    };
    let (_, starting) =
        thread::spawn_set_up("orders", narrow, carry_out).context("starting a thread")?;
    Ok((sender, starting))
}

fn guest_end(outcome: Outcome) -> GuestEnd {
    match outcome {
        Outcome::PoweredOff => GuestEnd::PoweredOff,
        Outcome::Reset => GuestEnd::Reset,
        Outcome::GuestExit(status) => GuestEnd::Exited { status },
        Outcome::Stopped => GuestEnd::Stopped,
        Outcome::Crashed(report) => GuestEnd::Crashed {
            report: report.to_string(),
        },
    }
}

#[cfg(test)]
#[path = "vmm_test.rs"]
mod tests;
