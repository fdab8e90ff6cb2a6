//! The HTTP API of a user-mode engine, at sockets of the user's.
//!
//! # Theory of operation
//! As with a daemon, each socket has a process of its own ([`crate::process::Api`]), confined before it
//! takes the first connection: it opens no file, makes no socket, reads the tables in memory that it has
//! mapped for reading, and asks this process for all else. The engine takes part as it does in a capture:
//! it sends records to a socket that it is given, for which its own confinement has what it takes.
//!
//! This process answers for the one VM of its command: it shows it, changes its definition as far as that
//! can be ([`super::definition`]), and passes orders on to its machine.
//! What the command line alone decides, and what needs a daemon, is refused with the reason.
use std::{
    fs,
    os::unix::{fs::MetadataExt as _, net::UnixListener},
    path::PathBuf,
    time::Instant,
};

use anyhow::Context as _;
use nix::{
    poll::{PollFd, PollFlags},
    sys::signal::Signal,
    unistd::geteuid,
};
use slipgate_control::Users;
use slipgate_ipc::{
    api::Event,
    client::{
        ClientAnswer, ClientId, ClientRequest, Filled, PassedOrder, PermittedRequest, Room,
        VmChange,
    },
};

use super::{
    Guest, Served,
    metrics::ScrapedPlace,
    place::{prepare_dir, private_dirs},
};
use crate::{
    config::{ApiSocket, Config},
    handover::HandedOver,
    machine_orders::MachineOrders,
    passed_tap,
    process::Api,
};

/// The number of the one engine, among those of a daemon.
const ENGINE: usize = 0;

/// A socket of the API that clients can connect to; its file goes with it.
#[derive(Debug)]
pub(super) struct ApiListener {
    listener: UnixListener,
    may_change: bool,
    path: PathBuf,
    /// Device and inode of its file.
    file: (u64, u64),
}

impl ApiListener {
    /// Makes the sockets.
    ///
    /// # Errors
    /// A path is in use, can't be used, or there is no such group.
    pub(super) fn listen(nat: &Config) -> anyhow::Result<Vec<Self>> {
        let private = private_dirs(nat);
        let listen = |socket: &ApiSocket| {
            let path = socket.path.clone();
            make_place(socket, &private)?;
            let listener = socket.listen(&mut HandedOver::default())?;
            let file = fs::metadata(&path)
                .with_context(|| format!("looking at the socket {}", path.display()))?;
            Ok(Self {
                listener,
                may_change: socket.may_change,
                path,
                file: (file.dev(), file.ino()),
            })
        };
        nat.api.iter().map(listen).collect()
    }
}

/// Makes the directory of a socket, if it is to be where no command of this user's sees it, and warns if
/// it is elsewhere.
fn make_place(socket: &ApiSocket, private: &[PathBuf]) -> anyhow::Result<()> {
    let flag = || format!("{} {}", socket.flag(), socket.path.display());
    let path = std::path::absolute(&socket.path).with_context(flag)?;
    let Some(dir) = path.parent() else {
        return Ok(());
    };
    if !prepare_dir(dir, private).with_context(flag)?
        && let Some(own) = private.first()
    {
        tracing::warn!(
            "{}: commands of `slipgate exec` of this user can connect to it; give a path below {}/api, \
             which they do not see",
            flag(),
            own.display()
        );
    }
    Ok(())
}

impl ApiListener {
    /// Removes the file: nobody more connects.
    fn remove_file(&self) {
        // Another one may have been made in its place.
        let file = fs::metadata(&self.path).map(|file| (file.dev(), file.ino()));
        if file.is_ok_and(|file| file == self.file) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Drop for ApiListener {
    fn drop(&mut self) {
        self.remove_file();
    }
}

/// The processes that answer the API, and orders of their clients that are under way.
#[derive(Debug)]
pub(super) struct Apis {
    processes: Vec<Api>,
    /// Users of these processes. That of the one for reading has the number of a VMM's, which there may be
    /// here.
    users: Users,
    orders: MachineOrders,
    listeners: Vec<ApiListener>,
}

impl Apis {
    /// Serves nobody yet. `others`: users of the other processes.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub(super) fn new(listeners: Vec<ApiListener>, others: &Users) -> anyhow::Result<Self> {
        let has_users = geteuid().is_root() && !listeners.is_empty();
        let orders = MachineOrders::new(None, PathBuf::new());
        Ok(Self {
            processes: Vec::new(),
            users: match has_users {
                true => Users::claim(),
                false => others.clone(),
            },
            orders: orders.context("preparing for orders to the machine")?,
            listeners,
        })
    }

    /// Has whoever connected to a socket answered, and ends the processes.
    pub(super) fn finish(mut self) {
        self.listeners.iter().for_each(ApiListener::remove_file);
        Api::finish(&mut self.processes);
    }

    /// Descriptors to poll, and what for.
    pub(super) fn fds(&self) -> impl Iterator<Item = PollFd<'_>> {
        let orders = PollFd::new(self.orders.fd(), PollFlags::POLLIN);
        self.processes.iter().flat_map(Api::fds).chain([orders])
    }

    /// When there is something to do without an event.
    pub(super) fn due(&self) -> Option<Instant> {
        self.processes.iter().filter_map(Api::due).min()
    }
}

impl Served {
    /// Starts the processes.
    ///
    /// # Errors
    /// The process has no descriptor left.
    pub(super) fn begin_apis(&mut self) -> anyhow::Result<()> {
        let scraped = ScrapedPlace {
            users: &self.apis.users,
            ..self.scraped()
        };
        let processes = self.apis.listeners.iter().map(|api| {
            let listener = api.listener.try_clone();
            let listener = listener.context("copying a socket of the API")?;
            Ok(Api::new(listener, api.may_change, &scraped, &self.log))
        });
        self.apis.processes = processes.collect::<anyhow::Result<_>>()?;
        let vm = self.vm.spec.name.clone();
        self.clients.events.push(Event::VmAdded { vm });
        Ok(())
    }

    /// Collects the requests of clients that their socket permits.
    pub(super) fn take_api_requests(&mut self) -> Vec<PermittedRequest> {
        let mut processes = std::mem::take(&mut self.apis.processes);
        let mut asked = Vec::new();
        for api in &mut processes {
            let scraped = ScrapedPlace {
                place: &self.place,
                nat: &self.nat,
                users: &self.apis.users,
            };
            for (client, request) in api.requests(&scraped, || self.clients.take_in()) {
                match request {
                    Ok(request) if api.permits(&request) => {
                        asked.push(PermittedRequest { client, request });
                    }
                    Ok(_) => self.clients.answer(client, &ClientAnswer::forbidden()),
                    Err(e) => {
                        let why = format!("making a socket for the answer ({e}): try again");
                        self.clients.answer(client, &ClientAnswer::busy(why));
                    }
                }
            }
        }
        self.apis.processes = processes;
        asked
    }

    /// Passes answers and events on, and connects the processes to the engine, which sends them events of
    /// flows.
    pub(super) fn tell_apis(&mut self, guest: &mut impl Guest) -> anyhow::Result<()> {
        for (client, _, answer) in self.apis.orders.done() {
            self.clients.answer(client, &answer);
        }
        self.clients.events.extend(guest.happened());
        let events = std::mem::take(&mut self.clients.events);
        let answers = self.clients.answers();
        let mut messages = Vec::new();
        for api in &mut self.apis.processes {
            events.iter().for_each(|event| api.event(event));
            for (client, answer) in &answers {
                api.answer(*client, answer);
            }
            if self.engine.is_none() {
                continue;
            }
            match api.connect_engine(ENGINE) {
                Ok(message) => messages.extend(message),
                Err(e) => tracing::debug!("making a pair of sockets: {e}"),
            }
        }
        messages
            .into_iter()
            .try_for_each(|message| self.send(message))
    }

    /// Answers what a daemon's clients ask for.
    pub(super) fn of_daemon(
        &mut self,
        client: ClientId,
        request: ClientRequest,
        guest: &mut impl Guest,
    ) -> anyhow::Result<()> {
        let is_served = match &request {
            ClientRequest::GetVm { name }
            | ClientRequest::RemoveVm { name }
            | ClientRequest::KeepVm { name } => *name == self.vm.spec.name,
            _ => true,
        };
        let answer = match request {
            _ if !is_served => ClientAnswer::UnknownVm {
                served: vec![self.vm.spec.name.clone()],
            },
            ClientRequest::ListVms => ClientAnswer::VmList {
                vms: vec![self.status()],
                room: self.room(),
                displaced: Vec::new(),
            },
            ClientRequest::GetVm { .. } => ClientAnswer::Vm {
                vm: Box::new(self.status()),
                change: VmChange::Unchanged,
            },
            ClientRequest::PutVm { vm, replaces, tap } => {
                // Whatever file that is, closing it keeps nobody waiting.
                let has_tap = tap.map(passed_tap::name_of).is_some();
                return self.put_vm(client, *vm, &replaces, has_tap);
            }
            ClientRequest::ListPolicies => ClientAnswer::PolicyList {
                policies: self.put_policies(),
            },
            ClientRequest::PutPolicy {
                name,
                text,
                replaces,
            } => return self.put_policy(client, name, Some(text), &replaces),
            ClientRequest::RemovePolicy { name, replaces } => {
                return self.put_policy(client, name, None, &replaces);
            }
            ClientRequest::ApiSockets => ClientAnswer::ApiSockets {
                paths: self.nat.api_paths(),
            },
            ClientRequest::ListMachines => ClientAnswer::MachineList {
                machines: guest.machine().into_iter().collect(),
            },
            ClientRequest::OrderMachine { vm, order } => {
                match self.order(client, guest, &vm, order) {
                    Some(answer) => answer,
                    None => return Ok(()),
                }
            }
            _ => ClientAnswer::error(format!(
                "{}: it is the guest of this slipgate's command, and comes and goes with that: end the \
                 command, or have VMs served by `slipgate serve`",
                self.vm.spec.name
            )),
        };
        self.clients.answer(client, &answer);
        Ok(())
    }

    /// Has the machine of this process carry out an order. Returns the answer, unless it comes later.
    fn order(
        &mut self,
        client: ClientId,
        guest: &mut impl Guest,
        vm: &str,
        order: PassedOrder,
    ) -> Option<ClientAnswer> {
        let Some(machine) = guest.machine().filter(|machine| machine.name == vm) else {
            return Some(ClientAnswer::unknown(format!(
                "no machine of `slipgate run` has the VM {vm:?} of this slipgate"
            )));
        };
        match order {
            // The API ends with the machine: the answer goes first.
            PassedOrder::Kill => {
                guest.signal(Signal::SIGTERM);
                Some(ClientAnswer::Done)
            }
            PassedOrder::Snapshot { .. } => Some(ClientAnswer::error(format!(
                "{vm}: user mode has no directory in which clients have snapshots made: use `slipgate \
                 snapshot`"
            ))),
            order => {
                let begun = self.apis.orders.begin(client, machine, order);
                begun.err().map(|refused| *refused)
            }
        }
    }

    fn room(&self) -> Room {
        let sizes = self.place.memory.maps.sizes();
        Room {
            vms: Filled {
                used: 1,
                most: sizes.vms,
            },
            rules: Filled {
                used: self.place.policies.rules_in_force(),
                most: sizes.rules,
            },
        }
    }
}
