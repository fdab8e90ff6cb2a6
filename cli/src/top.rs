//! `slipgate top`: live flows and VMs, in the terminal.
//!
//! It reads the pinned maps as `flows` and `stats` do, once a second, and does not slow packets.
//! [`state`] computes rates from two readings, and keeps sorting, filter and selection; [`view`]
//! draws the screen; this module handles the terminal. Keys that change something (cut, freeze,
//! thaw) send the same requests to the broker as the commands of these names, and show its answer.
mod state;
mod view;

use std::{
    io::IsTerminal as _,
    time::{Duration, Instant},
};

use anyhow::Context as _;
use nix::sys::{
    signal::{SigSet, Signal},
    signalfd::{SfdFlags, SignalFd},
};
use ratatui::{
    buffer::Buffer,
    crossterm::event::{self, Event, KeyEventKind},
    layout::Rect,
};
use slipgate_control::maps::ReadOnlyMaps;
use slipgate_ipc::{
    client::{ClientAnswer, ClientRequest, Target},
    engine::{EngineReply, EngineRequest},
};

use self::state::{Action, Change, Reading, State};
use crate::{
    args::TopArgs,
    brokers::{ANOTHER_ANSWER, ask_each, of_engine},
    show::{flows, flows::frozen, names, now_ns, open, print_once, served, stats},
};

/// Time between two readings.
const EVERY: Duration = Duration::from_secs(1);
/// Time for which a key is awaited before signals are checked.
const PATIENCE: Duration = Duration::from_millis(200);
/// Width of the screen, columns, when it is unknown.
const COLUMNS: u16 = 100;

/// Runs the command `slipgate top`.
pub(crate) fn run(args: &TopArgs) -> anyhow::Result<()> {
    let maps = open(&args.pin_dir)?;
    served(&maps, args.vm.as_deref())?;
    let mut state = State::new(args.sort, args.vm.clone());
    state.take(read(&maps, args));
    if args.once || !std::io::stdout().is_terminal() || !std::io::stdin().is_terminal() {
        // Rates take two readings.
        std::thread::sleep(EVERY);
        state.take(read(&maps, args));
        return print_once(&once(&state));
    }
    let signals = signals().context("waiting for signals")?;
    // Puts the terminal back when it panics, too.
    let mut terminal = ratatui::try_init().context("preparing the terminal")?;
    let ended = watch(&maps, args, &mut state, &mut terminal, &signals);
    ratatui::try_restore().context("putting the terminal back")?;
    ended
}

fn watch(
    maps: &ReadOnlyMaps,
    args: &TopArgs,
    state: &mut State,
    terminal: &mut ratatui::DefaultTerminal,
    signals: &SignalFd,
) -> anyhow::Result<()> {
    let mut due = Instant::now() + EVERY;
    loop {
        terminal
            .draw(|frame| view::draw(state, frame.area(), frame.buffer_mut()))
            .context("drawing")?;
        let left = due.saturating_duration_since(Instant::now());
        if event::poll(left.min(PATIENCE)).context("waiting for keys")?
            && let Event::Key(key) = event::read().context("reading keys")?
            && key.kind != KeyEventKind::Release
        {
            // While paused, and since the last reading, others may have frozen or thawed.
            state.know_frozen(frozen(maps));
            match state.press(key.code, key.modifiers) {
                Action::Nothing => {}
                Action::Quit => return Ok(()),
                Action::Ask(change, what) => {
                    state.say(ask(args, change, &what));
                    state.know_frozen(frozen(maps));
                }
            }
        }
        if signals.read_signal().context("reading signals")?.is_some() {
            return Ok(());
        }
        if Instant::now() >= due {
            due = Instant::now() + EVERY;
            if !state.is_paused() {
                state.take(read(maps, args));
            }
        }
    }
}

fn read(maps: &ReadOnlyMaps, args: &TopArgs) -> Reading {
    let names = names::ask_all(&args.pin_dir);
    let mut vms = stats::read(maps, stats::Which::named(None)).vms;
    for vm in &mut vms {
        vm.relayed = names.relayed.get(&vm.vm).copied();
    }
    Reading {
        at_ns: now_ns(),
        flows: flows::list(maps, &names),
        vms,
        frozen: frozen(maps),
    }
}

/// Sends a change to the broker; returns the result as a sentence.
fn ask(args: &TopArgs, change: Change, what: &str) -> String {
    let freezes = matches!(change, Change::Freeze(_));
    let request = match change {
        Change::Cut(target) => of_engine(target, EngineRequest::Cut),
        Change::Freeze(vm) => ClientRequest::Freeze { vm },
        Change::Thaw(vm) => of_engine(Target::Vm(vm), EngineRequest::Thaw),
    };
    match ask_each(&args.pin_dir, &request) {
        Ok(Ok(ClientAnswer::Engine {
            reply: EngineReply::Cut { flows: 0 },
        })) => format!("{what} had ended already"),
        Ok(Ok(ClientAnswer::Engine {
            reply: EngineReply::Cut { .. },
        })) => format!("cut {what}"),
        Ok(Ok(ClientAnswer::Done)) if freezes => format!("froze {what}"),
        Ok(Ok(ClientAnswer::Done)) => format!("thawed {what}"),
        Ok(Ok(_)) => ANOTHER_ANSWER.into(),
        Ok(Err(asked)) => format!("{:#}", asked.error(what)),
        Err(e) => format!("{e:#}"),
    }
}

/// One picture as text, as high as it takes.
fn once(state: &State) -> String {
    let columns = std::env::var("COLUMNS").ok();
    let columns = columns.and_then(|columns| columns.parse().ok());
    let width = columns.unwrap_or(COLUMNS).clamp(80, 500);
    let area = Rect::new(0, 0, width, view::height(state));
    let mut buffer = Buffer::empty(area);
    view::draw(state, area, &mut buffer);
    view::text(&buffer)
}

/// Signals that would leave the terminal as it is now, by descriptor.
fn signals() -> nix::Result<SignalFd> {
    let set: SigSet = [Signal::SIGTERM, Signal::SIGHUP, Signal::SIGINT]
        .into_iter()
        .collect();
    set.thread_block()?;
    SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
}

/// Returns a flow's name in requests to the broker.
fn target(flow: &flows::Flow) -> Target {
    Target::Flow(flow.id.to_string())
}

#[cfg(test)]
#[path = "top_test.rs"]
mod tests;
