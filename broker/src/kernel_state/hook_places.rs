//! Whether slipgate's programs are first at their hooks: looks, says so, and takes their place back.
//!
//! A change of tc filters is told by the kernel; of tcx programs it tells nothing. So the uplinks are
//! looked at every few seconds, and the TAPs in turn, [`TAPS_AT_ONCE`] at a time. A place that is
//! taken from slipgate again and again is given up in the end ([`contest`]).
mod contest;

use std::{
    collections::{BTreeSet, HashMap},
    os::fd::{AsFd, BorrowedFd},
    time::Instant,
};

use slipgate_abi::IfIndex;
use slipgate_control::{
    attach::{Program, chain::Standing, watch::FilterWatch},
    serve,
};
use slipgate_ipc::api::Event;

use self::contest::{Contest, Step};
use super::Attached;

/// TAPs that are looked at in one turn; each takes a system call or two, of some µs.
const TAPS_AT_ONCE: usize = 256;
/// Devices at which changed filters are looked at in one turn; the others are due in the next.
const CHANGED_AT_ONCE: usize = 64;

/// Places of slipgate's programs at the hooks, as last seen.
#[derive(Debug)]
pub(crate) struct HookPlaces {
    /// `None` on a host that was short of descriptors at the start.
    filters: Option<FilterWatch>,
    /// Devices with changed filters, to be looked at.
    due: BTreeSet<IfIndex>,
    /// Places that were lost lately, by device.
    contests: HashMap<IfIndex, Contest>,
    /// Index of the VM whose TAP is the next to be looked at.
    next_vm: usize,
}

impl HookPlaces {
    pub(crate) fn watch() -> Self {
        let filters = FilterWatch::open();
        if let Err(e) = &filters {
            tracing::warn!("others' tc filters are noticed late: {e}");
        }
        Self {
            filters: filters.ok(),
            due: BTreeSet::new(),
            contests: HashMap::new(),
            next_vm: 0,
        }
    }

    /// Descriptor to poll for input.
    pub(crate) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.filters.as_ref().map(FilterWatch::as_fd)
    }

    /// Whether devices are to be looked at at once.
    pub(crate) fn is_due(&self) -> bool {
        !self.due.is_empty()
    }
}

/// A program of slipgate's at a device.
struct AttachedProgram {
    ifindex: IfIndex,
    program: Program,
    /// Name of the device.
    device: String,
    is_tap: bool,
}

impl Attached {
    /// Looks at the devices at which others' filters changed.
    pub(crate) fn follow_filters(&mut self) {
        let places = &mut self.hook_places;
        match places.filters.as_ref().map(FilterWatch::take) {
            Some(Ok(changed)) => places.due.extend(changed),
            Some(Err(e)) => tracing::debug!("{e}"),
            None => {}
        }
        for _ in 0..CHANGED_AT_ONCE {
            let Some(ifindex) = self.hook_places.due.pop_first() else {
                break;
            };
            if let Some(place) = self.place_at(ifindex) {
                self.look_at_place(&place);
            }
        }
    }

    /// Looks at the uplinks, and at some of the TAPs.
    pub(crate) fn look_at_places(&mut self) {
        let mut uplinks = self.vm_uplinks.ifindexes();
        uplinks.insert(self.uplink.ifindex);
        let vms = self.vms.len();
        let from = self.hook_places.next_vm % vms.max(1);
        let looked = vms.min(TAPS_AT_ONCE);
        self.hook_places.next_vm = from + looked;
        let taps = (from..from + looked).filter_map(|at| {
            let vm = &self.vms[at % vms];
            vm.tap_ifindex.filter(|_| vm.is_up)
        });
        let all: Vec<IfIndex> = uplinks.into_iter().chain(taps).collect();
        for ifindex in all {
            if let Some(place) = self.place_at(ifindex) {
                self.look_at_place(&place);
            }
        }
        // Of a device that is not slipgate's any more nothing is contested.
        let mut contests = std::mem::take(&mut self.hook_places.contests);
        contests.retain(|ifindex, contest| {
            self.place_at(*ifindex).is_some() && !contest.is_over(Instant::now())
        });
        self.hook_places.contests = contests;
    }

    /// Returns the names of the devices at which somebody else's programs run before slipgate's.
    pub(crate) fn displaced(&self) -> Vec<String> {
        let links = &self.watch.network().links;
        let contests = self.hook_places.contests.iter();
        let lost = contests.filter(|(_, contest)| contest.is_lost());
        let names = lost.filter_map(|(ifindex, _)| links.get(ifindex));
        let mut names: Vec<String> = names.map(|link| link.name.clone()).collect();
        names.sort_unstable();
        names
    }

    fn place_at(&self, ifindex: IfIndex) -> Option<AttachedProgram> {
        let link = self.watch.network().links.get(&ifindex)?;
        let is_uplink =
            self.uplink.ifindex == ifindex || self.vm_uplinks.ifindexes().contains(&ifindex);
        let vm = self.vms.on_tap(&link.name).map(|at| &self.vms[at]);
        let is_tap = vm.is_some_and(|vm| vm.is_up && vm.tap_ifindex == Some(ifindex));
        let program = match (is_uplink, is_tap) {
            (true, _) => Program::uplink(link.has_l2),
            (false, true) => Program::GuestEgress,
            (false, false) => return None,
        };
        Some(AttachedProgram {
            ifindex,
            program,
            device: link.name.clone(),
            is_tap: !is_uplink,
        })
    }

    fn look_at_place(&mut self, place: &AttachedProgram) {
        let AttachedProgram {
            ifindex,
            program,
            device,
            ..
        } = place;
        let standing = match self.datapath.standing(*program, *ifindex) {
            Ok(standing) => standing,
            // It is gone: a notice is on its way.
            Err(e) => return tracing::debug!("{e}"),
        };
        let now = Instant::now();
        let contests = &mut self.hook_places.contests;
        if standing.is_first() {
            if contests.get_mut(ifindex).is_some_and(|it| it.is_first(now)) {
                tracing::info!("{device}: slipgate's program runs first again");
                let device = device.clone();
                self.events.push(Event::FirstAgain { device });
            }
            return;
        }
        let contest = contests.entry(*ifindex).or_default();
        if contest.is_news(&standing) {
            tracing::warn!("{}", told(device, &standing));
            self.events.push(Event::Displaced {
                device: device.clone(),
                place: standing.to_string(),
            });
        }
        match contest.lost(now) {
            Step::Wait => {}
            Step::GiveUp => tracing::error!(
                "{device}: slipgate's program lost its place {} times in a row, and leaves it now: \
                 have the other program attach behind slipgate's (tcx: BPF_F_AFTER; tc filter: a \
                 pref above 1), or not at {device}; slipgate goes on as it is, and looks whether \
                 the other one goes",
                contest::MOST_MOVES
            ),
            Step::Move => self.take_back(place, &standing),
        }
    }

    fn take_back(&mut self, place: &AttachedProgram, standing: &Standing) {
        let AttachedProgram {
            ifindex,
            program,
            device,
            is_tap,
        } = place;
        let moved = match (standing, is_tap) {
            // Somebody removed the qdisc: the program behind is gone with it.
            (Standing::Missing, true) => {
                serve::serve_tap(&self.datapath, *ifindex, self.tap_hook())
            }
            _ => self.datapath.move_to_front(*program, *ifindex),
        };
        let contests = &mut self.hook_places.contests;
        let Some(contest) = contests.get_mut(ifindex) else {
            return;
        };
        match moved {
            Ok(()) => {
                contest.is_first(Instant::now());
                tracing::info!("{device}: slipgate's program is first again");
                let device = device.clone();
                self.events.push(Event::FirstAgain { device });
            }
            // Another start holds the lock: the next look tries again.
            Err(e) if e.is_locked() => contest.postponed(),
            Err(e) => tracing::warn!("{device}: the place can't be taken back: {e}"),
        }
    }
}

fn told(device: &str, standing: &Standing) -> String {
    let consequence = match standing {
        Standing::Missing => "packets pass it by",
        _ => "which may keep packets from it, change them, or take them for itself",
    };
    format!("{device}: slipgate's program {standing}, {consequence}")
}
