//! What the server says (RFC 8415 section 18.3).
use std::net::Ipv6Addr;

use super::{
    AddressUse, REBIND_S, REFRESH_S, RENEW_S,
    message::{Association, Kind, Request, code, put, reply_kind},
};
use crate::ndp::advertisement::{PREFERRED_LIFETIME_S, VALID_LIFETIME_S};

/// Codes of the status option (RFC 8415 section 21.13).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Status {
    Success = 0,
    NoAddressesAvailable = 2,
    NotOnLink = 4,
    UseMulticast = 5,
    NoPrefixAvailable = 6,
}

/// The highest preference: the client need not wait for other servers (RFC 8415 section 18.2.1).
const ONLY_SERVER: u8 = 255;

/// The server as a VM's guest sees it.
pub(super) struct Server {
    /// Its identity.
    pub(super) duid: [u8; 10],
    pub(super) resolver: Ipv6Addr,
    /// The guest's single address; `None`: there is none to give.
    pub(super) address: Option<Ipv6Addr>,
}

/// A message, and what the client may do with its address by it.
type Reply = Option<(Vec<u8>, AddressUse)>;

impl Server {
    /// Answers an information request (RFC 8415 section 16.12).
    pub(super) fn inform(&self, request: &Request<'_>) -> Reply {
        let is_for_this = request.server_id.is_none_or(|id| id == self.duid);
        if !is_for_this || !request.associations.is_empty() {
            return None;
        }
        let mut message = self.begin(request, reply_kind::REPLY);
        self.put_configuration(request, &mut message);
        if request.asks_for(code::REFRESH_TIME) {
            put(&mut message, code::REFRESH_TIME, &REFRESH_S.to_be_bytes());
        }
        Some((message, AddressUse::Unchanged))
    }

    /// Answers a message that was not sent to all servers, as clients must (RFC 8415 section 18.4).
    pub(super) fn refuse_unicast(&self, request: &Request<'_>) -> Reply {
        let is_told = matches!(
            request.kind,
            Kind::Request | Kind::Renew | Kind::Release | Kind::Decline
        );
        if !is_told || !self.is_valid(request) {
            return None;
        }
        let mut message = self.begin(request, reply_kind::REPLY);
        put_status(&mut message, Status::UseMulticast);
        Some((message, AddressUse::Unchanged))
    }

    /// Answers a message about the guest's address.
    pub(super) fn assign(&self, request: &Request<'_>) -> Reply {
        if !self.is_valid(request) {
            return None;
        }
        match request.kind {
            Kind::Solicit => {
                let is_rapid = request.has_rapid_commit && self.address.is_some();
                Some(self.offer(request, is_rapid))
            }
            Kind::Request | Kind::Renew | Kind::Rebind => Some(self.grant(request)),
            Kind::Confirm => self.confirm(request),
            Kind::Release | Kind::Decline => Some(self.take_back(request)),
            Kind::InformationRequest => None,
        }
    }

    /// Whether a message has the identities that its kind requires (RFC 8415 section 16).
    fn is_valid(&self, request: &Request<'_>) -> bool {
        let names_server = match request.kind {
            Kind::Solicit | Kind::Confirm | Kind::Rebind => request.server_id.is_none(),
            _ => request.server_id == Some(&self.duid),
        };
        names_server && request.client_id.is_some()
    }

    fn offer(&self, request: &Request<'_>, is_rapid: bool) -> (Vec<u8>, AddressUse) {
        let kind = match is_rapid {
            true => reply_kind::REPLY,
            false => reply_kind::ADVERTISE,
        };
        let mut message = self.begin(request, kind);
        let granted = self.put_associations(request, &mut message);
        match is_rapid {
            true => put(&mut message, code::RAPID_COMMIT, &[]),
            false => put(&mut message, code::PREFERENCE, &[ONLY_SERVER]),
        }
        self.put_configuration(request, &mut message);
        let address = match granted {
            Some(address) if is_rapid => AddressUse::Granted(address),
            _ => AddressUse::Unchanged,
        };
        (message, address)
    }

    fn grant(&self, request: &Request<'_>) -> (Vec<u8>, AddressUse) {
        let mut message = self.begin(request, reply_kind::REPLY);
        let granted = self.put_associations(request, &mut message);
        self.put_configuration(request, &mut message);
        let address = granted.map_or(AddressUse::Unchanged, AddressUse::Granted);
        (message, address)
    }

    /// Says whether the client's addresses are the VM's. Without any, or while the host has the VM's,
    /// there is nothing to say (RFC 8415 section 18.3.3).
    fn confirm(&self, request: &Request<'_>) -> Reply {
        let own = self.address?;
        request.addresses().next()?;
        let mut message = self.begin(request, reply_kind::REPLY);
        let is_on_link = request.addresses().all(|address| address == own);
        put_status(
            &mut message,
            match is_on_link {
                true => Status::Success,
                false => Status::NotOnLink,
            },
        );
        Some((message, AddressUse::Unchanged))
    }

    fn take_back(&self, request: &Request<'_>) -> (Vec<u8>, AddressUse) {
        let mut message = self.begin(request, reply_kind::REPLY);
        put_status(&mut message, Status::Success);
        let own = self.address;
        let given_back = own.filter(|own| request.addresses().any(|address| address == *own));
        let address = given_back.map_or(AddressUse::Unchanged, AddressUse::Released);
        (message, address)
    }

    fn begin(&self, request: &Request<'_>, kind: u8) -> Vec<u8> {
        let [a, b, c] = request.transaction;
        let mut message = vec![kind, a, b, c];
        if let Some(id) = request.client_id {
            put(&mut message, code::CLIENT_ID, id);
        }
        put(&mut message, code::SERVER_ID, &self.duid);
        message
    }

    fn put_configuration(&self, request: &Request<'_>, message: &mut Vec<u8>) {
        if request.asks_for(code::RESOLVERS) {
            put(message, code::RESOLVERS, &self.resolver.octets());
        }
    }

    /// Answers each association. Returns the address if one of them has it.
    fn put_associations(&self, request: &Request<'_>, message: &mut Vec<u8>) -> Option<Ipv6Addr> {
        let has_own =
            |it: &Association| self.address.is_some_and(|own| it.addresses.contains(&own));
        let all = &request.associations;
        let is_na = |it: &&Association| it.code == code::IA_NA;
        let holder = all.iter().filter(is_na).find(|it| has_own(it));
        let holder = holder.or_else(|| all.iter().find(is_na));
        let mut granted = None;
        for association in all {
            let is_holder = holder.is_some_and(|holder| std::ptr::eq(holder, association));
            let own = self.address.filter(|_| is_holder);
            let option = answered(association, own, request.kind, &mut granted);
            put(message, association.code, &option);
        }
        granted
    }
}

/// Returns the contents of the option that answers an association. `own`: the address that it may have.
/// `granted` is set if it has it.
fn answered(
    association: &Association,
    own: Option<Ipv6Addr>,
    kind: Kind,
    granted: &mut Option<Ipv6Addr>,
) -> Vec<u8> {
    let others = || {
        let all = association.addresses.iter();
        all.filter(|address| Some(**address) != own)
    };
    // A client that wants an address which is not the link's is told so (RFC 8415 section 18.3.2); one
    // that has one gives it up.
    let is_off_link = kind == Kind::Request && own.is_some() && others().next().is_some();
    let given = own.filter(|_| !is_off_link);
    let mut option = association.id.to_vec();
    if association.code != code::IA_TA {
        let times = given.map_or([0, 0], |_| [RENEW_S, REBIND_S]);
        option.extend(times.into_iter().flat_map(u32::to_be_bytes));
    }
    if let Some(own) = given {
        put_address(&mut option, own, PREFERRED_LIFETIME_S, VALID_LIFETIME_S);
        *granted = given;
    }
    if matches!(kind, Kind::Renew | Kind::Rebind) {
        for other in others() {
            put_address(&mut option, *other, 0, 0);
        }
    }
    match (association.code, given) {
        (_, Some(_)) => {}
        (code::IA_PD, None) => put_status(&mut option, Status::NoPrefixAvailable),
        (_, None) if is_off_link => put_status(&mut option, Status::NotOnLink),
        (_, None) => put_status(&mut option, Status::NoAddressesAvailable),
    }
    option
}

fn put_address(option: &mut Vec<u8>, address: Ipv6Addr, preferred_s: u32, valid_s: u32) {
    let mut data = address.octets().to_vec();
    data.extend(preferred_s.to_be_bytes());
    data.extend(valid_s.to_be_bytes());
    put(option, code::IA_ADDRESS, &data);
}

fn put_status(message: &mut Vec<u8>, status: Status) {
    // The text is empty: the code says it.
    put(message, code::STATUS, &(status as u16).to_be_bytes());
}
