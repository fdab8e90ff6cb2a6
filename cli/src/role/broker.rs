//! The broker: the process that `slipgate attach` starts in. It has CAP_NET_ADMIN and CAP_BPF and
//! never sees a guest's packet.
//!
//! # Theory of operation
//! 1. Everything in the kernel is made or joined, but no TAP is brought up ([`attached`]).
//! 2. The engine is started from this binary, is sent descriptors and how it is to work, drops
//!    what it may, adopts what a predecessor left, and says that it is ready.
//! 3. TAPs are attached to and brought up, and `slipgate: ready` is printed.
//! 4. One loop follows the network, answers the control socket and watches the engine.
//!
//! When the engine ends unasked, so does the broker, with an error: established flows go on in the
//! kernel, pins stay, and the next start adopts them. When the broker dies the engine sees the end
//! of the channel, and the kernel kills it in any case. SIGTERM and SIGINT end both in order, as
//! `--on-exit` says; SIGHUP opens the flow log again.
mod attached;
mod bound_ports;
mod engine_process;
mod follow;
mod network_view;
mod reserve;
mod rule_texts;
mod xdp;

use std::{
    collections::HashMap,
    io::Write as _,
    os::fd::AsFd as _,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, bail};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::{SigSet, Signal},
        signalfd::{SfdFlags, SignalFd},
    },
};
use slipgate_abi::Protocol;
use slipgate_control::{BpfLog, host::HostFacts};
use userspace_nat::{engine::OnExit as EngineExit, rules::Destination};

use self::{attached::Attached, engine_process::EngineProcess};
use crate::{
    args::{Mode, OnExit},
    channel::{Received, ToBroker, ToEngine, WhyAnswer, WhyQuestion},
    config::{Config, Dns},
    control_socket::{Answer, ClientId, ControlServer, Request},
    host, sandbox,
};

/// The line that says that guests are served.
const READY: &str = "slipgate: ready";
/// DNS.
const DNS_PORT: u16 = 53;
/// How long the engine may take to adopt, or to end flows.
const ENGINE_WITHIN: Duration = Duration::from_secs(60);
/// How often the host is looked at for what it sends no notice of: sockets bound to translated
/// ports, forwarding turned on for the TAPs.
const LOOK_EVERY: Duration = Duration::from_secs(10);

/// Runs until stopped.
pub(crate) fn run(config: Config, log: &str) -> anyhow::Result<()> {
    let signals = signals().context("waiting for signals")?;
    for warning in host::warnings(&HostFacts::read(), &config.nat_ports) {
        tracing::warn!("{warning}");
    }
    let mode = config.mode;
    let attached = Attached::new(config).with_context(|| match mode {
        Mode::Auto => "--mode auto: the hybrid NAT can't run, and there is no other mode yet",
        Mode::Hybrid | Mode::Userspace => "the hybrid NAT can't run",
    })?;
    let mut broker = Broker::start(attached, log)?;
    broker.announce()?;
    let exit = match broker.serve(&signals) {
        Ok(exit) => exit,
        Err(e) => return Err(broker.engine_end().unwrap_or(e)),
    };
    broker.stop(exit)
}

struct Broker {
    attached: Attached,
    engine: EngineProcess,
    control: ControlServer,
    /// Questions that the engine has not answered yet.
    asked: HashMap<u64, (ClientId, Destination)>,
    next_question: u64,
    reserved_ports: Vec<(u8, u16)>,
    look_due: Instant,
    /// With `--bpf-log`.
    programs_log: Option<BpfLog>,
}

impl Broker {
    fn start(mut attached: Attached, log: &str) -> anyhow::Result<Self> {
        let owner = std::env::var("SUDO_UID").ok();
        let owner = owner.and_then(|uid| uid.parse().ok());
        let owner = owner.unwrap_or_else(|| nix::unistd::getuid().as_raw());
        let socket = format!("{}.sock", attached.owner.row());
        let control = ControlServer::bind(&attached.datapath.paths().run_dir.join(socket), owner)?;
        let reserved_ports = bound_ports::bound(&attached.config.nat_ports);
        let started = EngineProcess::start(&attached, &reserved_ports, log)
            .and_then(|mut engine| Ok((engine.await_ready(ENGINE_WITHIN)?, engine)));
        let (adopted, engine) = match started {
            Ok(started) => started,
            Err(e) => {
                drop(control);
                attached.give_up();
                return Err(e);
            }
        };
        attached.write_forwards()?;
        if attached.owner.adopted() {
            tracing::info!("took over {adopted} flows of a predecessor");
        }
        let mut broker = Self {
            programs_log: attached.datapath.take_log(),
            attached,
            engine,
            control,
            asked: HashMap::new(),
            next_question: 0,
            reserved_ports,
            look_due: Instant::now() + LOOK_EVERY,
        };
        // Adopted flows and the engine's first ones may have claimed next hops.
        broker.attached.refresh_next_hops()?;
        broker.attached.close_departed()?;
        broker.attached.serve_taps()?;
        sandbox::limit_broker().context("giving up what the broker does not need")?;
        Ok(broker)
    }

    fn announce(&self) -> anyhow::Result<()> {
        let a = &self.attached;
        let names: Vec<_> = a.vms.iter().map(|vm| vm.config.name.as_str()).collect();
        let mut out = std::io::stdout().lock();
        writeln!(
            out,
            "{READY}: {} by {}, engine port {}",
            names.join(", "),
            a.uplink.name,
            a.port.name
        )
        .and_then(|()| out.flush())
        .context("writing to stdout")
    }

    /// The loop. Returns when it is asked to stop.
    fn serve(&mut self, signals: &SignalFd) -> anyhow::Result<OnExit> {
        loop {
            let wait = self.look_due.saturating_duration_since(Instant::now());
            let timeout = PollTimeout::try_from(wait).unwrap_or(PollTimeout::MAX);
            let mut fds = vec![
                PollFd::new(signals.as_fd(), PollFlags::POLLIN),
                PollFd::new(self.engine.pidfd(), PollFlags::POLLIN),
                PollFd::new(self.engine.channel().as_fd(), PollFlags::POLLIN),
                PollFd::new(self.attached.watch.as_fd(), PollFlags::POLLIN),
            ];
            fds.extend(
                self.control
                    .fds()
                    .map(|fd| PollFd::new(fd, PollFlags::POLLIN)),
            );
            let log = self.programs_log.as_ref();
            fds.extend(log.map(|log| PollFd::new(log.as_fd(), PollFlags::POLLIN)));
            match poll(&mut fds, timeout) {
                Ok(_) | Err(nix::Error::EINTR) => {}
                Err(e) => return Err(e).context("waiting for something to do"),
            }
            let ready: Vec<bool> = fds.iter().map(|fd| fd.any().unwrap_or(true)).collect();
            drop(fds);
            if ready[0]
                && let Some(signal) = signals.read_signal()?
            {
                if signal.ssi_signo != Signal::SIGHUP as u32 {
                    return Ok(self.attached.config.on_exit);
                }
                // The old file goes on being written to where the new one can't be opened.
                match self.engine.reopen_flow_log(&self.attached) {
                    Ok(()) => tracing::info!("opened the flow log again"),
                    Err(e) => tracing::warn!("{e:#}"),
                }
            }
            if ready[2] {
                self.hear_engine()?;
            }
            if ready[1] {
                bail!("the engine has ended");
            }
            if ready[3] {
                self.follow_network()?;
            }
            if ready[4..].contains(&true)
                && let Some(exit) = self.answer_control()?
            {
                return Ok(exit);
            }
            if let Some(log) = &mut self.programs_log {
                log.flush();
            }
            if Instant::now() >= self.look_due {
                self.look_due = Instant::now() + LOOK_EVERY;
                self.attached.keep_unrouted();
                self.look_at_ports()?;
                self.attached.look_at_guards();
            }
        }
    }

    fn hear_engine(&mut self) -> anyhow::Result<()> {
        let mut refresh = false;
        loop {
            match self.engine.channel().try_receive::<ToBroker>()? {
                Received::Nothing => break,
                Received::End => bail!("the engine has closed its channel"),
                Received::Message(ToBroker::NextHopsWanted, _) => refresh = true,
                Received::Message(ToBroker::Why { request, answer }, _) => {
                    self.pass_on(request, answer);
                }
                Received::Message(ToBroker::Ready { .. } | ToBroker::Stopped, _) => {}
            }
        }
        if refresh {
            self.attached.refresh_next_hops()?;
        }
        Ok(())
    }

    /// Gives the engine's answer to who asked, with the reason from the rules.
    fn pass_on(&mut self, request: u64, answer: WhyAnswer) {
        if let Some((client, to)) = self.asked.remove(&request) {
            let explanation = self.attached.policy.explain(to).to_string();
            let mut answer = WhyAnswer {
                explanation,
                ..answer
            };
            if to.port == DNS_PORT && self.attached.config.dns == Dns::Refused {
                answer.admitted = false;
                answer.rule = "--dns none".into();
                answer.outcome = "answered REFUSED, whatever is asked".into();
            }
            self.control.answer(client, &Answer::Why(answer));
        }
    }

    /// When the loop failed because the engine has ended: how, and what now.
    fn engine_end(&mut self) -> Option<anyhow::Error> {
        let end = self.engine.end()?;
        Some(anyhow!(
            "the engine {end}; established flows go on in the kernel and new ones are refused: \
             run `slipgate attach` again, which takes them over"
        ))
    }

    fn follow_network(&mut self) -> anyhow::Result<()> {
        let changes = self.attached.watch.update()?;
        if changes.links {
            for vm in self.attached.follow_taps()? {
                self.engine.tell(&ToEngine::Vm(vm))?;
            }
        }
        if changes.links || changes.routes {
            self.attached.follow_uplink()?;
        }
        if changes.links || changes.routes || changes.addresses {
            let view = self.attached.network_view();
            self.attached.policy.set_local(&view.local);
            self.engine.tell(&ToEngine::Network(view))?;
        }
        if changes.any() {
            self.attached.refresh_next_hops()?;
        }
        Ok(())
    }

    fn answer_control(&mut self) -> anyhow::Result<Option<OnExit>> {
        for (client, request) in self.control.serve() {
            match request {
                Request::Why(question) => self.ask_why(client, question)?,
                Request::Stop { keep } => {
                    self.control.answer(client, &Answer::Done);
                    return Ok(Some(if keep { OnExit::Keep } else { OnExit::Detach }));
                }
            }
        }
        Ok(None)
    }

    fn ask_why(&mut self, client: ClientId, question: WhyQuestion) -> anyhow::Result<()> {
        let vms = &self.attached.vms;
        let Some(vm) = vms.iter().find(|vm| vm.config.name == question.vm) else {
            let names: Vec<_> = vms.iter().map(|vm| vm.config.name.as_str()).collect();
            let error = format!(
                "no VM {:?} is served; there is {}",
                question.vm,
                names.join(", ")
            );
            self.control.answer(client, &Answer::Error { error });
            return Ok(());
        };
        let Some(protocol) = Protocol::from_ip(question.protocol) else {
            let error = format!("IP protocol {} has no flows", question.protocol);
            self.control.answer(client, &Answer::Error { error });
            return Ok(());
        };
        self.next_question += 1;
        let to = Destination {
            addr: question.address,
            port: question.port,
            protocol,
        };
        self.asked.insert(self.next_question, (client, to));
        self.engine.tell(&ToEngine::Why {
            request: self.next_question,
            row: vm.open.row as u16,
            address: question.address,
            port: question.port,
            protocol: question.protocol,
        })
    }

    fn look_at_ports(&mut self) -> anyhow::Result<()> {
        let now = bound_ports::bound(&self.attached.config.nat_ports);
        if now != self.reserved_ports {
            self.engine.tell(&ToEngine::ReservedPorts(now.clone()))?;
            self.reserved_ports = now;
        }
        Ok(())
    }

    /// Ends both processes in order.
    fn stop(mut self, exit: OnExit) -> anyhow::Result<()> {
        if exit == OnExit::Detach {
            // Nothing new comes from the guests while their flows end.
            self.attached.shut_taps()?;
        }
        self.engine.tell(&ToEngine::Shutdown(match exit {
            OnExit::Detach => EngineExit::Detach,
            OnExit::Keep => EngineExit::Keep,
        }))?;
        self.engine.await_stopped(ENGINE_WITHIN)?;
        match exit {
            OnExit::Keep => tracing::info!("stopped; flows go on in the kernel"),
            OnExit::Detach => {
                // Its socket is in the directory that goes.
                drop(self.control);
                let pin_dir = self.attached.config.pin_dir.clone();
                let all = self.attached.detach()?;
                // Others' may be in it, of other network namespaces.
                let _ = std::fs::remove_dir(pin_dir);
                tracing::info!(
                    "stopped; {}",
                    if all {
                        "nothing is left in the kernel"
                    } else {
                        "others still use the maps"
                    }
                );
            }
        }
        Ok(())
    }
}

/// Signals that end the loop, or (SIGHUP) have the flow log opened again, by descriptor.
fn signals() -> nix::Result<SignalFd> {
    let mut set = SigSet::empty();
    set.add(Signal::SIGTERM);
    set.add(Signal::SIGINT);
    set.add(Signal::SIGHUP);
    let mut blocked = set;
    blocked.add(Signal::SIGPIPE);
    blocked.thread_block()?;
    SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
}
