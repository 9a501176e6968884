//! Credentials and verifiers (RFC 5531 §8.2, §10, appendix A).

use crate::wire::codec::{Reader, Writer, XdrError, roundup_bytes};

/// Most octets of the body of a credential or verifier.
pub const AUTH_BODY_BYTES_MAX: usize = 400;
/// Most octets of a machine name in AUTH_SYS.
pub const MACHINE_NAME_BYTES_MAX: usize = 255;
/// Most further groups in AUTH_SYS.
pub const GIDS_MAX: usize = 16;

const AUTH_NONE: u32 = 0;
/// The flavor of [`AuthSys`].
pub const AUTH_SYS: u32 = 1;

/// A credential or verifier as it travels: `| flavor | length | body | roundup |`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct OpaqueAuth<'a> {
    pub flavor: u32,
    /// At most [`AUTH_BODY_BYTES_MAX`] octets.
    pub body: &'a [u8],
}

impl<'a> OpaqueAuth<'a> {
    /// AUTH_NONE, with an empty body as §10.1 recommends.
    pub const NONE: Self = Self { flavor: AUTH_NONE, body: &[] };

    /// # Errors
    /// It is cut, or its body is longer than may be.
    pub fn read(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        Ok(Self { flavor: reader.u32()?, body: reader.opaque(AUTH_BODY_BYTES_MAX)? })
    }

    /// # Panics
    /// If the body is longer than may be: no peer would take it.
    pub fn write(&self, writer: &mut Writer) {
        assert!(self.body.len() <= AUTH_BODY_BYTES_MAX, "an authentication body of {} octets", self.body.len());
        writer.u32(self.flavor);
        writer.opaque(self.body);
    }

    /// Octets as written.
    pub const fn encoded_bytes(&self) -> usize {
        8 + self.body.len() + roundup_bytes(self.body.len() as u64) as usize
    }

    /// Whom it names.
    ///
    /// # Errors
    /// The body is not what its flavor says.
    pub fn credential(&self) -> Result<Credential<'a>, XdrError> {
        match self.flavor {
            // Its body is undefined (§10.1), so it is not looked at.
            AUTH_NONE => Ok(Credential::None),
            AUTH_SYS => {
                let mut reader = Reader::new(self.body);
                let sys = AuthSys::read(&mut reader)?;
                reader.finish()?;
                Ok(Credential::Sys(sys))
            }
            flavor => Ok(Credential::Other { flavor }),
        }
    }
}

/// Who calls.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Credential<'a> {
    None,
    Sys(AuthSys<'a>),
    /// A flavor that is not read here.
    Other {
        flavor: u32,
    },
}

/// What a Unix host says of the caller, unproven: `| stamp | machine name | uid | gid | gids |` (appendix A).
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct AuthSys<'a> {
    /// Any number.
    pub stamp: u32,
    pub machine_name: &'a [u8],
    pub uid: u32,
    pub gid: u32,
    /// Further groups.
    pub gids: Vec<u32>,
}

impl<'a> AuthSys<'a> {
    /// # Errors
    /// It is cut, or its name or groups are more than may be.
    pub fn read(reader: &mut Reader<'a>) -> Result<Self, XdrError> {
        Ok(Self {
            stamp: reader.u32()?,
            machine_name: reader.opaque(MACHINE_NAME_BYTES_MAX)?,
            uid: reader.u32()?,
            gid: reader.u32()?,
            gids: reader.array(GIDS_MAX, 4, Reader::u32)?,
        })
    }

    /// The body of a credential.
    ///
    /// # Panics
    /// If the name or the groups are more than may be.
    pub fn body(&self) -> Vec<u8> {
        assert!(self.machine_name.len() <= MACHINE_NAME_BYTES_MAX && self.gids.len() <= GIDS_MAX);
        let mut writer = Writer::new();
        writer.u32(self.stamp);
        writer.opaque(self.machine_name);
        writer.u32(self.uid);
        writer.u32(self.gid);
        writer.array(&self.gids, |writer, &gid| writer.u32(gid));
        writer.finish()
    }

    /// The credential around `body`, made by [`AuthSys::body`].
    pub const fn around(body: &[u8]) -> OpaqueAuth<'_> {
        OpaqueAuth { flavor: AUTH_SYS, body }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sys() -> AuthSys<'static> {
        AuthSys { stamp: 7, machine_name: b"host1", uid: 1000, gid: 100, gids: vec![4, 24] }
    }

    #[test]
    fn auth_sys_is_read_from_its_octets_and_written_as_them() {
        // Appendix A, by hand: stamp, "host1" with three roundup octets, uid 1000, gid 100, two groups.
        let octets = [
            &[0, 0, 0, 7, 0, 0, 0, 5][..],
            b"host1\0\0\0",
            &[0, 0, 0x03, 0xe8, 0, 0, 0, 100, 0, 0, 0, 2, 0, 0, 0, 4, 0, 0, 0, 24],
        ]
        .concat();
        assert_eq!(AuthSys::around(&octets).credential(), Ok(Credential::Sys(sys())));
        assert_eq!(sys().body(), octets);
    }

    #[test]
    fn octets_behind_auth_sys_are_an_error() {
        let mut octets = sys().body();
        octets.extend([0; 4]);
        assert!(AuthSys::around(&octets).credential().is_err());
    }

    #[test]
    fn auth_sys_has_at_most_sixteen_groups_and_a_name_of_255() {
        for (groups, name, good) in [(16, 255, true), (17, 255, false), (16, 256, false)] {
            let mut writer = Writer::new();
            writer.u32(0);
            writer.opaque(&vec![b'n'; name]);
            writer.u32(0);
            writer.u32(0);
            writer.array(&vec![1; groups], |writer, &gid| writer.u32(gid));
            let body = writer.finish();
            assert_eq!(AuthSys::around(&body).credential().is_ok(), good, "{groups} groups, a name of {name}");
        }
    }

    #[test]
    fn the_body_of_auth_none_is_not_looked_at() {
        assert_eq!(OpaqueAuth { flavor: 0, body: b"anything" }.credential(), Ok(Credential::None));
        assert_eq!(OpaqueAuth { flavor: 6, body: b"gss" }.credential(), Ok(Credential::Other { flavor: 6 }));
    }

    #[test]
    fn a_body_of_400_octets_is_read_and_one_more_is_not() {
        for (len, good) in [(400, true), (401, false)] {
            let mut writer = Writer::new();
            writer.u32(6);
            writer.opaque(&vec![1; len]);
            let octets = writer.finish();
            assert_eq!(OpaqueAuth::read(&mut Reader::new(&octets)).is_ok(), good, "{len} octets");
        }
    }
}
