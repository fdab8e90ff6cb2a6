//! `slipgate policy learn`: the smallest policy that covers the observed traffic, of a running VM
//! ([`live`]) or from a flow log.
mod live;

use std::{
    io,
    os::fd::BorrowedFd,
    path::Path,
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::signalfd::SignalFd,
};

use slipgate_policy::tools::{
    flow_log::{Reader, Recorded, Seen},
    learn::Learnt,
};

use super::flow_log::Follower;
use crate::{
    args::{DEFAULT_GATEWAY, LearnArgs},
    control::stop_signals,
    log::say,
    show::print_once,
};
use slipgate_policy::document::ConfigError;

/// Interval at which a followed log is read.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// Exit status when the policy does not cover all observed traffic.
const EXIT_INCOMPLETE: u8 = 4;

pub(super) fn run(args: &LearnArgs) -> anyhow::Result<ExitCode> {
    let only = args.vm.as_deref();
    let mut learnt = Learnt::default();
    let mut recorded = Recorded::default();
    let mut each = |seen: Seen| {
        recorded.note(&seen);
        learnt.take(seen, only);
    };
    let (reader, of) = match (&args.flow_log, only) {
        (Some(log), _) => (from_log(args, log, &mut each)?, log.display().to_string()),
        (None, Some(vm)) => (live::listen(args, vm, &mut each)?, vm.to_owned()),
        (None, None) => unreachable!("clap has one of them given"),
    };
    if let (Some(log), false) = (&args.flow_log, args.follow) {
        recorded.has(only, "VM", log)?;
    }
    let mut remarks: Vec<String> = learnt.too_much().into_iter().collect();
    remarks.extend(incomplete(&reader));
    for remark in &remarks {
        say(format_args!("{remark}"));
    }
    if reader.foreign > 0 {
        let foreign = reader.foreign;
        say(format_args!(
            "{foreign} lines of {of} are no records and were left out"
        ));
    }
    if learnt.is_empty() {
        say(format_args!(
            "{of} has no flow{} that a guest opened: nothing was learnt",
            match (&args.flow_log, only) {
                (Some(_), Some(vm)) => format!(" of {vm}"),
                _ => String::new(),
            }
        ));
    }
    print_once(&learnt.toml(only, DEFAULT_GATEWAY.into(), args.generalise, &remarks))?;
    Ok(match remarks.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::from(EXIT_INCOMPLETE),
    })
}

/// Returns remarks on records that may be missing from the input.
fn incomplete(reader: &Reader) -> Vec<String> {
    let mut remarks = Vec::new();
    if reader.lost > 0 {
        let lost = reader.lost;
        remarks.push(format!(
            "{lost} records were lost, for they were not read fast enough: their flows are not \
             covered"
        ));
    }
    if reader.untold > 0 {
        let untold = reader.untold;
        remarks.push(format!(
            "{untold} addresses were told by DNS for which there was no room: flows to them are \
             covered by address alone"
        ));
    }
    remarks
}

fn from_log(args: &LearnArgs, log: &Path, each: &mut dyn FnMut(Seen)) -> anyhow::Result<Reader> {
    if args.lasts.is_some() && !args.follow {
        let remedy = "give --follow too, or leave it out";
        let problem = "a flow log is read to its end";
        return Err(ConfigError::new("--for", "", problem, remedy).into());
    }
    let mut follower = Follower::open(log)?;
    follower.more(each)?;
    if args.follow {
        let mut wait = Wait::begin(args)?;
        say(format_args!(
            "following {}; ^C prints what was learnt",
            log.display()
        ));
        loop {
            let end = wait.until(None, Some(LOOK_EVERY))?;
            follower.more(each)?;
            if end {
                break;
            }
        }
    }
    Ok(follower.reader)
}

/// Waits for ^C, or the end of a time.
struct Wait {
    signals: SignalFd,
    end: Option<Instant>,
}

impl Wait {
    fn begin(args: &LearnArgs) -> anyhow::Result<Self> {
        Ok(Self {
            signals: stop_signals().context("waiting for ^C")?,
            end: args.lasts.map(|lasts| Instant::now() + lasts),
        })
    }

    /// Waits until `fd` is readable or a time has passed; returns whether to end.
    fn until(
        &mut self,
        fd: Option<BorrowedFd<'_>>,
        most: Option<Duration>,
    ) -> anyhow::Result<bool> {
        use std::os::fd::AsFd as _;
        let left = |end: Instant| end.saturating_duration_since(Instant::now());
        let wait = [self.end.map(left), most].into_iter().flatten().min();
        let timeout = match wait {
            // Rounded up: it is over when it is waited for, not just before.
            Some(wait) => PollTimeout::try_from(wait + Duration::from_millis(1)),
            None => Ok(PollTimeout::NONE),
        };
        let timeout = timeout.unwrap_or(PollTimeout::MAX);
        let mut fds = vec![PollFd::new(self.signals.as_fd(), PollFlags::POLLIN)];
        fds.extend(fd.map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
        match poll(&mut fds, timeout) {
            Ok(_) | Err(nix::Error::EINTR) => {}
            Err(e) => return Err(io::Error::from(e)).context("waiting for ^C"),
        }
        let asked = fds[0].any().unwrap_or(true);
        Ok(asked || self.end.is_some_and(|end| Instant::now() >= end))
    }
}
