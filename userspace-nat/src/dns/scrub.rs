//! Rewrites an answer, so that it has only records that belong to the question.
//!
//! | section | kept |
//! | --- | --- |
//! | answer | of the names that lead from the one asked for to the last: the first CNAME; of the last one: the type asked for; DNAMEs above them; the signatures of these |
//! | authority | the SOA of a zone around the last name; with DO its signature, and the signed proofs (NSEC, NSEC3) of zones around these names |
//! | additional | nothing: it is optional, and its addresses open nothing |
//!
//! So no resolver or zone can give a guest data about a name that was not asked for, and no such
//! data is cached (RFC 5452 section 6). The exception are proofs of what does not exist: their
//! owners are other names of the same zone, or hashes of these, and a client that validates needs
//! them (RFC 4035 section 3.1.3, RFC 5155 section 7.2). Which zone a proof is of says the signer in
//! its signature; without one it proves nothing, and is left out.
//!
//! Every address that is left is one of [`super::chain::Chain`], by which policies judge an answer.
//! So of a name with a CNAME nothing else is left, whatever the question (RFC 1034 section 3.6.2),
//! but its NSEC and signatures (RFC 4035 section 2.5).
//!
//! A record that cannot be parsed is left out. Names are
//! expanded and compressed again, so that no pointer leads into removed data; in types newer than
//! RFC 1035 they are not compressed (RFC 3597 section 4).
//!
//! Two parameters of SVCB and HTTPS records can be left out ([`Omitted`]), from their `mandatory`
//! list too: `ech` ([RFC 9848](https://www.rfc-editor.org/rfc/rfc9848)), because a client that has
//! no key cannot hide the name that it connects to; and `ipv6hint`, for a client without IPv6.
use std::{collections::HashSet, net::Ipv6Addr};

use super::{
    message::{HEADER_LEN, Header, Record, Type, word},
    name,
    query::Key,
};

/// Most records of a message that are examined. A message with more is rejected.
const MAX_RECORDS: usize = 512;
/// Most names in a chain of aliases.
pub(super) const MAX_STEPS: usize = 16;
/// Most offsets that a name may point back to, and most labels removed to find one: a bound for the
/// work.
const MAX_PLACES: usize = 32;
const MAX_PARENTS: usize = 8;
/// SvcParamKey of the list of mandatory keys (RFC 9460 section 14.3.2).
const MANDATORY: u16 = 0;
const ECH: u16 = 5;
const IPV6_HINT: u16 = 6;

/// Parameters of SVCB and HTTPS records that are left out.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Omitted {
    pub(super) ech: bool,
    pub(super) ipv6_hints: bool,
}

impl Omitted {
    /// Whether a parameter is left out.
    fn has(self, key: u16) -> bool {
        self.ech && key == ECH || self.ipv6_hints && key == IPV6_HINT
    }
}

/// A rewritten message and facts about it.
#[derive(Debug)]
pub(super) struct Scrubbed {
    pub(super) message: Vec<u8>,
    /// Offsets of the TTL fields in the message.
    pub(super) ttls: Vec<u16>,
    /// Smallest TTL in the answer section, seconds.
    pub(super) answer_ttl: u32,
    /// Whether the answer section has the records asked for.
    pub(super) answered: bool,
    /// Lifetime of a negative answer, seconds (RFC 2308 section 5).
    pub(super) negative_ttl: Option<u32>,
    /// Upper eight bits of the response code, from the OPT record.
    pub(super) extended_rcode: u8,
}

/// A record of the message, and its owner in lower case.
struct Owned {
    owner: Box<[u8]>,
    record: Record,
}

/// Rewrites the answer to `key`, without some parameters. `None` if the message cannot be parsed to
/// its end.
pub(super) fn scrub(
    message: &[u8],
    header: &Header,
    key: Key<'_>,
    omitted: Omitted,
) -> Option<Scrubbed> {
    let question_end = HEADER_LEN + key.name().0.len() + 4;
    let counts = header.counts.map(usize::from);
    if counts[1] + counts[2] + counts[3] > MAX_RECORDS {
        return None;
    }
    let mut at = question_end;
    let (mut answers, mut authorities) = (Vec::with_capacity(counts[1]), Vec::new());
    let mut opt = None;
    for (section, count) in counts.into_iter().enumerate().skip(1) {
        for _ in 0..count {
            let record = Record::read(message, at)?;
            let start = at;
            at = record.data.end;
            if record.rtype == Type::OPT {
                // RFC 6891 section 6.1.1: one, among the additional records.
                if section != 3 || opt.is_some() {
                    return None;
                }
                opt = Some((record.ttl >> 24) as u8);
                continue;
            }
            let owner = name::expand(message, start)?;
            let is_alias = record.rtype == Type::CNAME;
            let is_broken = is_alias && name::end(message, record.data.start) != Some(at);
            match section {
                _ if is_broken || !is_in(&record, key) => {}
                1 => answers.push(Owned { owner, record }),
                2 => authorities.push(Owned { owner, record }),
                _ => {}
            }
        }
    }

    let mut writer = Writer::new(header.bits, key);
    let chain = chain(message, &answers, key)?;
    let last = chain.last().map_or(key.name().0, |name| name);
    let is_step = |owner: &[u8]| *owner == *key.name().0 || chain.iter().any(|s| **s == *owner);
    let has_alias = |o: &Owned| o.record.rtype == Type::CNAME && *o.owner == *last;
    let is_alias = answers.iter().any(has_alias);
    let belongs = |owner: &[u8], rtype: u16| match rtype {
        Type::CNAME => is_step(owner),
        Type::DNAME => is_above(owner, key, &chain),
        _ if *owner != *last => false,
        _ if key.qtype() == Type::ANY => !is_alias || rtype == Type::NSEC,
        _ => rtype == key.qtype(),
    };
    let (mut answer_ttl, mut answered, mut kept) = (u32::MAX, false, 0_u16);
    let mut cnames: Vec<&[u8]> = Vec::new();
    for Owned { owner, record } in &answers {
        let wanted = match record.rtype {
            Type::CNAME if is_step(owner) => {
                let first = !cnames.contains(&&**owner);
                cnames.push(owner);
                first
            }
            Type::RRSIG if key.qtype() != Type::RRSIG => {
                let signed = Signed::read(message, record);
                signed.is_some_and(|signed| belongs(owner, signed.rtype))
            }
            rtype => belongs(owner, rtype),
        };
        if !wanted {
            continue;
        }
        if writer.record(message, owner, record, omitted) {
            kept += 1;
            answer_ttl = answer_ttl.min(record.ttl);
            answered |= record.rtype == key.qtype() || key.qtype() == Type::ANY;
        } else if record.rtype == Type::CNAME {
            // There is no room for it: what it leads to would be without it.
            return None;
        }
    }
    writer.count(1, kept);

    let dnssec_ok = key.edns() == Some(true);
    let signed = |owned| proof(message, owned, key, &chain);
    let proofs: HashSet<(&[u8], u16)> = match dnssec_ok {
        true => authorities.iter().filter_map(signed).collect(),
        false => HashSet::new(),
    };
    let (mut negative_ttl, mut kept) = (None, 0_u16);
    for owned in &authorities {
        let Owned { owner, record } = owned;
        let wanted = match record.rtype {
            Type::SOA => ends_with(last, owner),
            Type::NSEC | Type::NSEC3 => proofs.contains(&(&**owner, record.rtype)),
            Type::RRSIG if dnssec_ok => {
                let signs_soa = |signed: Signed| signed.rtype == Type::SOA;
                signed(owned).is_some()
                    || ends_with(last, owner)
                        && Signed::read(message, record).is_some_and(signs_soa)
            }
            _ => false,
        };
        if wanted && writer.record(message, owner, record, omitted) {
            kept += 1;
            if record.rtype == Type::SOA {
                let minimum = message[record.data.clone()].last_chunk::<4>();
                negative_ttl = minimum.map(|m| record.ttl.min(u32::from_be_bytes(*m)));
            }
        }
    }
    writer.count(2, kept);
    u16::try_from(writer.out.len()).ok()?;
    Some(Scrubbed {
        message: writer.out,
        ttls: writer.ttls,
        answer_ttl,
        answered,
        negative_ttl,
        extended_rcode: opt.unwrap_or(0),
    })
}

/// What a signature is of (RFC 4034 section 3.1).
struct Signed {
    /// Type of the records that it signs.
    rtype: u16,
    /// The zone that signed them, in lower case.
    zone: Box<[u8]>,
}

impl Signed {
    /// Reads an RRSIG; `None` if the record is another, or malformed.
    fn read(message: &[u8], record: &Record) -> Option<Self> {
        /// Octets before the signer's name, which is not compressed.
        const FIXED: usize = 18;
        if record.rtype != Type::RRSIG {
            return None;
        }
        let data = message.get(record.data.clone())?;
        let zone = data.get(FIXED..name::end_of_plain(data, FIXED)?)?;
        Some(Self {
            rtype: word(data, 0)?,
            zone: zone.to_ascii_lowercase().into(),
        })
    }

    /// Whether it signs a proof that its zone can give under this name: NSEC has a name of the zone
    /// as owner, NSEC3 a hash right below it.
    fn proves(&self, owner: &[u8]) -> bool {
        match self.rtype {
            Type::NSEC => ends_with(owner, &self.zone),
            Type::NSEC3 => parents(owner).nth(1) == Some(&*self.zone),
            _ => false,
        }
    }
}

/// Owner and type of the proof that a record signs, if it is of a zone around a name of the chain.
fn proof<'o>(
    message: &[u8],
    Owned { owner, record }: &'o Owned,
    key: Key<'_>,
    chain: &[Box<[u8]>],
) -> Option<(&'o [u8], u16)> {
    let signed = Signed::read(message, record)?;
    let proves = signed.proves(owner) && is_above(&signed.zone, key, chain);
    proves.then_some((&**owner, signed.rtype))
}

/// Whether a record has the class asked for.
fn is_in(record: &Record, key: Key<'_>) -> bool {
    const ANY_CLASS: u16 = 255;
    record.class == key.qclass() || key.qclass() == ANY_CLASS
}

/// Names to which CNAMEs lead from the one asked for, in order. `None` if they form a loop, or are
/// more than [`MAX_STEPS`].
fn chain(message: &[u8], answers: &[Owned], key: Key<'_>) -> Option<Vec<Box<[u8]>>> {
    let mut chain: Vec<Box<[u8]>> = Vec::new();
    if matches!(key.qtype(), Type::CNAME | Type::ANY) {
        return Some(chain);
    }
    loop {
        let current = chain.last().map_or(key.name().0, |name| name);
        let is_next = |o: &&Owned| o.record.rtype == Type::CNAME && *o.owner == *current;
        let Some(next) = answers.iter().find(is_next) else {
            return Some(chain);
        };
        let target = name::expand(message, next.record.data.start)?;
        if chain.len() == MAX_STEPS || *target == *key.name().0 || chain.contains(&target) {
            return None;
        }
        chain.push(target);
    }
}

/// Whether `owner` is a name of the chain, or a parent of one.
fn is_above(owner: &[u8], key: Key<'_>, chain: &[Box<[u8]>]) -> bool {
    ends_with(key.name().0, owner) || chain.iter().any(|step| ends_with(step, owner))
}

/// Whether `name` is `parent` or below it; both in wire form and lower case.
fn ends_with(name: &[u8], parent: &[u8]) -> bool {
    parents(name).any(|rest| *rest == *parent)
}

/// A name and its parents up to the root.
fn parents(name: &[u8]) -> impl Iterator<Item = &[u8]> {
    let mut next = Some(name);
    std::iter::from_fn(move || {
        let this = next?;
        let len = usize::from(*this.first()?);
        next = (len > 0).then(|| this.get(1 + len..)).flatten();
        Some(this)
    })
}

struct Writer {
    out: Vec<u8>,
    ttls: Vec<u16>,
    /// Names written so far, in lower case, with their offsets.
    places: Vec<(Box<[u8]>, u16)>,
}

impl Writer {
    /// Begins a message with a header, whose counts are zero except the question's, and the
    /// question.
    fn new(bits: u16, key: Key<'_>) -> Self {
        let mut out = vec![0; HEADER_LEN];
        out[2..4].copy_from_slice(&bits.to_be_bytes());
        out[5] = 1;
        key.write_question(&mut out);
        let mut writer = Self {
            out,
            ttls: Vec::new(),
            places: Vec::new(),
        };
        writer.remember(key.name().0, HEADER_LEN);
        writer
    }

    fn count(&mut self, section: usize, records: u16) {
        let at = 4 + 2 * section;
        self.out[at..at + 2].copy_from_slice(&records.to_be_bytes());
    }

    /// Appends a record. Returns `false`, and appends nothing, if its data cannot be parsed.
    fn record(&mut self, message: &[u8], owner: &[u8], record: &Record, omitted: Omitted) -> bool {
        let (before, places) = (self.out.len(), self.places.len());
        self.name(owner);
        let ttl_at = self.out.len() + 4;
        for word in [record.rtype, record.class] {
            self.out.extend(word.to_be_bytes());
        }
        self.out.extend(record.ttl.to_be_bytes());
        self.out.extend([0; 2]);
        let data_at = self.out.len();
        let written = self.data(message, record, omitted).is_some();
        let len = u16::try_from(self.out.len() - data_at);
        if let (true, Ok(len), Ok(ttl_at)) = (written, len, u16::try_from(ttl_at)) {
            self.out[data_at - 2..data_at].copy_from_slice(&len.to_be_bytes());
            self.ttls.push(ttl_at);
            return true;
        }
        self.out.truncate(before);
        self.places.truncate(places);
        false
    }

    fn data(&mut self, message: &[u8], record: &Record, omitted: Omitted) -> Option<()> {
        let data = record.data.clone();
        match record.rtype {
            Type::A if data.len() != 4 => None,
            Type::AAAA if data.len() != size_of::<Ipv6Addr>() => None,
            // NS, MD, MF, CNAME, MB, MG, MR, PTR.
            2 | 3 | 4 | Type::CNAME | 7 | 8 | 9 | Type::PTR => self
                .names(message, data.start, data.end, 1, true)?
                .ends_at(data.end),
            Type::SOA => {
                let rest = self.names(message, data.start, data.end, 2, true)?;
                let rest = message.get(rest.0..data.end).filter(|r| r.len() == 20)?;
                self.out.extend(rest);
                Some(())
            }
            // MINFO, RP.
            14 | 17 => self
                .names(message, data.start, data.end, 2, false)?
                .ends_at(data.end),
            Type::MX => self.behind(message, record, 2, 1, true),
            // AFSDB, RT, KX.
            18 | 21 | 36 => self.behind(message, record, 2, 1, false),
            // PX.
            26 => self.behind(message, record, 2, 2, false),
            Type::SRV => self.behind(message, record, 6, 1, false),
            Type::NAPTR => {
                let mut fixed = 4;
                for _ in 0..3 {
                    fixed += 1 + usize::from(*message[data.clone()].get(fixed)?);
                }
                self.behind(message, record, fixed, 1, false)
            }
            Type::DNAME => self
                .names(message, data.start, data.end, 1, false)?
                .ends_at(data.end),
            Type::SVCB | Type::HTTPS => {
                self.out.extend(message[data.clone()].get(..2)?);
                let rest = self.names(message, data.start + 2, data.end, 1, false)?;
                self.parameters(message.get(rest.0..data.end)?, omitted)
            }
            _ => {
                self.out.extend(&message[data]);
                Some(())
            }
        }
    }

    /// Appends octets unchanged, then names to the end.
    fn behind(
        &mut self,
        message: &[u8],
        record: &Record,
        fixed: usize,
        names: usize,
        compress: bool,
    ) -> Option<()> {
        let data = record.data.clone();
        self.out.extend(message[data.clone()].get(..fixed)?);
        self.names(message, data.start + fixed, data.end, names, compress)?
            .ends_at(data.end)
    }

    /// Appends this many names that begin at `at`. Returns the offset after them.
    fn names(
        &mut self,
        message: &[u8],
        mut at: usize,
        limit: usize,
        count: usize,
        compress: bool,
    ) -> Option<End> {
        for _ in 0..count {
            let name = name::expand_as_is(message, at)?;
            at = name::end(message, at).filter(|end| *end <= limit)?;
            if compress {
                self.name(&name);
            } else {
                self.out.extend(&*name);
            }
        }
        Some(End(at))
    }

    /// Appends SvcParams (RFC 9460 section 2.2), without some.
    fn parameters(&mut self, mut params: &[u8], omitted: Omitted) -> Option<()> {
        while !params.is_empty() {
            let (key, len) = (word(params, 0)?, usize::from(word(params, 2)?));
            let value = params.get(4..4 + len)?;
            params = &params[4 + len..];
            if omitted == Omitted::default() || key != MANDATORY && !omitted.has(key) {
                self.parameter(key, value)?;
            } else if key == MANDATORY {
                let (keys, []) = value.as_chunks::<2>() else {
                    return None;
                };
                let left = keys
                    .iter()
                    .filter(|k| !omitted.has(u16::from_be_bytes(**k)));
                let left: Vec<u8> = left.flatten().copied().collect();
                if !left.is_empty() {
                    self.parameter(key, &left)?;
                }
            }
        }
        Some(())
    }

    fn parameter(&mut self, key: u16, value: &[u8]) -> Option<()> {
        self.out.extend(key.to_be_bytes());
        self.out
            .extend(u16::try_from(value.len()).ok()?.to_be_bytes());
        self.out.extend(value);
        Some(())
    }

    /// Appends a name, compressed by a pointer to an earlier copy of it or of a parent.
    fn name(&mut self, name: &[u8]) {
        let low = name.to_ascii_lowercase();
        let start = self.out.len();
        for parent in parents(&low).take(MAX_PARENTS) {
            let place = self.places.iter().find(|(known, _)| **known == *parent);
            if let Some((_, place)) = place {
                let at = low.len() - parent.len();
                self.out.extend(&name[..at]);
                self.out.extend((0xc000 | place).to_be_bytes());
                if at > 0 {
                    self.remember(&low, start);
                }
                return;
            }
        }
        self.out.extend(name);
        self.remember(&low, start);
    }

    /// Records a name and some of its parents as targets of pointers.
    fn remember(&mut self, low: &[u8], start: usize) {
        for parent in parents(low).take(MAX_PARENTS).filter(|rest| rest.len() > 1) {
            let at = start + low.len() - parent.len();
            let known = self.places.iter().any(|(known, _)| **known == *parent);
            if self.places.len() == MAX_PLACES || at >= 0x4000 || known {
                return;
            }
            self.places.push((parent.into(), at as u16));
        }
    }
}

/// Offset after the names.
struct End(usize);

impl End {
    fn ends_at(self, end: usize) -> Option<()> {
        (self.0 == end).then_some(())
    }
}

#[cfg(test)]
#[path = "scrub_test.rs"]
mod tests;
